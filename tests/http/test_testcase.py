"""Django's own TestCase wraps every test in a transaction that it never commits."""

from __future__ import annotations

from typing import Any

import pytest
from django.test import TestCase, override_settings

from idempotency import current_claim
from tests.factories import TokenFactory
from tests.http.callers import effects
from tests.http.views import KINDS


@override_settings(ROOT_URLCONF="tests.http.views")
class ProtectedViewsInTestCase(TestCase):
    def setUp(self) -> None:
        token = TokenFactory()
        self.headers = {"Authorization": f"Token {token.key}"}

    def post(self, url: str, key: str, data: Any = None) -> Any:
        return self.client.post(
            url, data or {}, content_type="application/json", headers={**self.headers, "Idempotency-Key": key}
        )

    def test_every_kind_of_view_works(self) -> None:
        for count, kind in enumerate(KINDS, start=1):
            with self.subTest(kind):
                url = f"/kinds/{kind}/"
                first = self.post(url, kind)
                assert first.status_code == 201
                replay = self.post(url, kind)
                assert replay.content == first.content
                assert replay["Idempotency-Replayed"] == "true"
                assert self.post(url, kind, {"amount": 2}).status_code == 422
                assert effects() == count

    def test_a_run_that_is_not_kept_is_undone_and_the_test_goes_on(self) -> None:
        self.client.raise_request_exception = False
        for kind in KINDS:
            with self.subTest(kind):
                url = f"/kinds/{kind}/"
                assert self.post(f"{url}?crash=1", f"{kind}-crash").status_code == 500
                assert self.post(f"{url}?status=503", f"{kind}-busy").status_code == 503
                assert effects() == 0
                assert current_claim() is None

    def test_a_test_that_looks_at_callbacks_of_on_commit_finds_its_own_only(self) -> None:
        with self.captureOnCommitCallbacks() as callbacks:
            assert self.post("/kinds/function/", "k").status_code == 201
        assert callbacks == []


@pytest.mark.usefixtures("atomic_requests")
class ProtectedViewsInTestCaseUnderAtomicRequests(ProtectedViewsInTestCase):
    pass
