"""Django's own TestCase wraps every test in a transaction that it never commits."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext, suppress
from typing import Any, ClassVar

import pytest
from django.contrib.auth.models import User
from django.db import connection, transaction
from django.http import HttpResponse
from django.test import TestCase, override_settings
from django.test.utils import CaptureQueriesContext
from django.urls import path
from django.views.decorators.cache import never_cache
from django.views.decorators.csrf import csrf_exempt
from rest_framework.exceptions import APIException
from rest_framework.request import Request
from rest_framework.test import APIClient, APIRequestFactory, APITestCase
from rest_framework.views import APIView

from idempotency import Operation, current_claim, idempotent
from idempotency.contrib.rest_framework import IdempotentMixin
from testproject.models import Charge, Transfer
from tests.factories import TokenFactory, UserFactory
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

    async def test_the_async_client_works(self) -> None:
        headers = {**self.headers, "Idempotency-Key": "k"}
        answers = [
            await self.async_client.post("/kinds/async_function/", {}, content_type="application/json", headers=headers)
            for _ in range(2)
        ]
        assert answers[0].status_code == 201
        assert answers[1].content == answers[0].content


@pytest.mark.usefixtures("atomic_requests")
class ProtectedViewsInTestCaseUnderAtomicRequests(ProtectedViewsInTestCase):
    pass


class SampleChargesInAPITestCase(APITestCase):
    def setUp(self) -> None:
        self.client.credentials(HTTP_AUTHORIZATION=f"Token {TokenFactory().key}", HTTP_IDEMPOTENCY_KEY="k")

    def test_a_failure_that_is_raised_is_recorded_and_the_test_goes_on(self) -> None:
        refused, replay = (self.client.post("/charges/", {"amount": 0}, format="json") for _ in range(2))
        assert refused.status_code == 400
        assert replay.content == refused.content
        assert replay["Idempotency-Replayed"] == "true"
        assert Charge.objects.count() == 0


@pytest.mark.usefixtures("atomic_requests")
class SampleChargesInAPITestCaseUnderAtomicRequests(SampleChargesInAPITestCase):
    pass


class Failing(APIView):
    """After its effect it fails as the query asks."""

    authentication_classes = permission_classes = ()

    def post(self, request: Request) -> HttpResponse:
        Transfer.objects.create(account=User.objects.get(), recipient="carol", amount=1)
        if "api" in request.GET:
            raise APIException
        if "crash" in request.GET:
            raise ValueError
        return HttpResponse()


class OptionallyProtected(Failing):
    post = idempotent("testcase.optional", required=False)(Failing.post)


class OptionallyProtectedByMixin(IdempotentMixin, Failing):
    idempotent_operations: ClassVar = {"post": Operation("testcase.mixin", required=False)}


def directly(view: Any, query: str) -> None:
    view(APIRequestFactory().post(f"/{query}", {}, format="json"))


def by_the_client(view: Any, query: str) -> None:
    with override_settings(ROOT_URLCONF=(path("", view),)):
        APIClient().post(f"/{query}", {}, format="json")


def below_a_decorator(view: Any, query: str) -> None:
    by_the_client(never_cache(view), query)


def by_another_view(view: Any, query: str) -> None:
    by_the_client(csrf_exempt(lambda request: view(request)), query)


@pytest.mark.django_db
@pytest.mark.usefixtures("atomic_requests")
@pytest.mark.parametrize("call", [directly, by_the_client, below_a_decorator, by_another_view])
@pytest.mark.parametrize("query", ["", "?api=1", "?crash=1"])
@pytest.mark.parametrize("protected", [OptionallyProtected, OptionallyProtectedByMixin])
def test_without_a_key_the_transactions_are_those_of_the_unprotected_view(
    protected: Any, call: Callable[[Any, str], None], query: str
) -> None:
    """The statements, the block that DRF marks for rollback, and the effects, with and without an ``atomic()`` around.

    DRF's own tests call a view directly, in an ``atomic()`` of theirs.
    """
    UserFactory()

    def seen(view: Any) -> list[object]:
        found: list[object] = []
        for block in (transaction.atomic, nullcontext):
            if block is nullcontext and call is directly and query == "?api=1":
                continue  # DRF marks the transaction of the test
            before = effects()
            with CaptureQueriesContext(connection) as queries, block():
                with suppress(ValueError):
                    call(view, query)
                found.append(transaction.get_rollback())
            found += [len(queries), effects() - before]
        return found

    assert seen(protected.as_view()) == seen(Failing.as_view())
