"""Transactions that are already there: ATOMIC_REQUESTS, ``atomic()`` around a view and within it, TestCase."""

from __future__ import annotations

import json
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from django.db import connection, transaction
from django.http import HttpRequest, HttpResponse
from django.test import TestCase, override_settings
from django.utils.decorators import method_decorator
from django.views import View
from django.views.decorators.cache import never_cache
from rest_framework.test import APITestCase

from idempotency import PARK, current_claim, idempotent
from idempotency.models import IdempotencyRecord
from testproject.models import Charge
from tests.factories import TokenFactory
from tests.http.callers import Caller, Serve, effects, problem_code
from tests.http.views import KINDS, UNPROTECTED_ACTIONS, plain_answer

ASYNC = ("async_function", "async_method")


async def async_plain_answer(request: HttpRequest) -> HttpResponse:
    return await sync_to_async(plain_answer)(request)


committing = pytest.mark.django_db(transaction=True)


# 20: ATOMIC_REQUESTS


@pytest.mark.scenario(20)
@committing
@pytest.mark.usefixtures("urls", "atomic_requests")
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_view_is_protected_under_atomic_requests(alice: Caller, kind: str, transport: str) -> None:
    alice.transport = transport
    url = f"/kinds/{kind}/"
    first = alice.post(url, {"amount": 1}, key="k")
    assert first.status_code == 201
    replay = alice.post(url, {"amount": 1}, key="k")
    assert replay["Idempotency-Replayed"] == "true"
    assert replay.content == first.content
    assert effects() == 1
    assert problem_code(alice.post(url, {"amount": 2}, key="k")) == "idempotency_key_reused"
    assert alice.post(f"{url}?crash=1", key="crash").status_code == 500
    assert effects() == 1
    assert IdempotencyRecord.objects.get(idempotency_key="crash").status == "recoverable"


@pytest.mark.scenario(20)
@committing
@pytest.mark.usefixtures("atomic_requests")
@pytest.mark.parametrize("kind", ["async_function", "async_method", "without a key"])
def test_what_passes_through_an_async_view_is_refused_as_django_refuses_it(
    alice: Caller, serve: Serve, kind: str, transport: str, caplog: pytest.LogCaptureFixture
) -> None:
    alice.transport = transport
    view: Any = idempotent("tests.optional", required=False)(async_plain_answer)
    if kind != "without a key":
        view, _ = KINDS[kind]
    serve(view)
    refused = alice.request("POST" if kind == "without a key" else "GET")
    assert refused.status_code == 500
    assert "You cannot use ATOMIC_REQUESTS with async views." in caplog.text
    assert effects() == 0


@pytest.mark.scenario(20)
@committing
@pytest.mark.usefixtures("atomic_requests")
def test_a_class_whose_as_view_is_protected_as_a_whole_opens_no_transaction_around_it(
    alice: Caller, serve: Serve
) -> None:
    class Whole(View):
        @classmethod
        def as_view(cls, **initkwargs: Any) -> Any:
            return idempotent("tests.whole")(super().as_view(**initkwargs))

        def post(self, request: HttpRequest) -> HttpResponse:
            return plain_answer(request)

        @idempotent("tests.put")
        def put(self, request: HttpRequest) -> HttpResponse:
            raise NotImplementedError

    serve(Whole.as_view())
    assert [alice.post(key="k").status_code for _ in range(2)] == [201, 201]
    assert effects() == 1


@pytest.mark.scenario(20)
@committing
@pytest.mark.usefixtures("atomic_requests")
@pytest.mark.parametrize("kind", ["function", "class"])
def test_an_async_view_that_the_project_has_exempted_passes_through(alice: Caller, serve: Serve, kind: str) -> None:
    class Exempt(View):
        @idempotent("tests.async_method")
        async def post(self, request: HttpRequest) -> HttpResponse:
            return await async_plain_answer(request)

        async def get(self, request: HttpRequest) -> HttpResponse:
            return await async_plain_answer(request)

    view: Any = Exempt.as_view() if kind == "class" else idempotent("tests.async")(async_plain_answer)
    serve(transaction.non_atomic_requests(view))
    got = alice.get()
    assert got.status_code == 201
    assert not json.loads(got.content)["in_transaction"]
    assert json.loads(alice.post(key="k").content)["in_transaction"]


@pytest.mark.scenario(20)
@committing
@pytest.mark.usefixtures("urls", "atomic_requests")
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ASYNC])
def test_what_passes_through_keeps_its_transaction(alice: Caller, kind: str) -> None:
    url = f"/kinds/{kind}/"
    got = alice.get(url)
    assert json.loads(got.content)["in_transaction"]
    assert effects() == 1
    assert alice.get(f"{url}?crash=1").status_code == 500
    assert effects() == 1


@pytest.mark.scenario(20)
@committing
@pytest.mark.usefixtures("urls")
@pytest.mark.parametrize("kind", KINDS)
def test_what_passes_through_gets_no_transaction_without_atomic_requests(alice: Caller, kind: str) -> None:
    assert not json.loads(alice.get(f"/kinds/{kind}/").content)["in_transaction"]
    assert alice.get(f"/kinds/{kind}/?crash=1").status_code == 500
    assert effects() == 2


@pytest.mark.scenario(20)
@committing
@pytest.mark.usefixtures("urls", "atomic_requests")
@pytest.mark.parametrize("kind", UNPROTECTED_ACTIONS)
def test_unprotected_actions_of_a_protected_viewset_keep_their_transaction(alice: Caller, kind: str) -> None:
    url = f"/unprotected/{kind}/"
    answer = json.loads(alice.post(url, key="k").content)
    assert answer["in_transaction"]
    assert answer["operation"] is None
    assert effects() == 1
    assert alice.post(f"{url}?crash=1", key="k").status_code == 500
    assert effects() == 1
    assert not IdempotencyRecord.objects.exists()


@pytest.mark.scenario(20)
@committing
@pytest.mark.usefixtures("atomic_requests")
def test_without_an_optional_key_the_request_keeps_its_transaction(alice: Caller, serve: Serve) -> None:
    serve(idempotent("tests.optional", required=False)(plain_answer))
    assert json.loads(alice.post().content)["in_transaction"]
    assert alice.post("/?crash=1").status_code == 500
    assert effects() == 1


@pytest.mark.scenario(20)
@committing
@pytest.mark.usefixtures("atomic_requests")
def test_outside_of_a_transaction_means_outside_under_atomic_requests_too(alice: Caller, serve: Serve) -> None:
    serve(idempotent("tests.outside_atomic_requests", transaction=False, recovery=PARK)(plain_answer))
    assert not json.loads(alice.post(key="k").content)["in_transaction"]
    assert alice.post(key="k")["Idempotency-Replayed"] == "true"
    assert effects() == 1


@pytest.mark.scenario(20)
@committing
@pytest.mark.usefixtures("atomic_requests")
def test_an_unprotected_view_beside_protected_ones_is_untouched(alice: Caller, serve: Serve) -> None:
    serve(plain_answer)
    assert json.loads(alice.post().content)["in_transaction"]
    assert alice.post("/?crash=1").status_code == 500
    assert effects() == 1


@pytest.mark.scenario(20)
@committing
@pytest.mark.usefixtures("atomic_requests")
@pytest.mark.parametrize("cured", [False, True], ids=["as it is", "with the remedy"])
def test_where_another_decorator_hides_the_protection_the_error_names_the_remedy(
    alice: Caller, serve: Serve, cured: bool, caplog: pytest.LogCaptureFixture
) -> None:
    class Hidden(View):
        @method_decorator(never_cache)
        @idempotent("tests.hidden")
        def post(self, request: HttpRequest) -> HttpResponse:
            return plain_answer(request)

    serve(transaction.non_atomic_requests(Hidden.as_view()) if cured else Hidden.as_view())
    answers = [alice.post(key="k"), alice.post(key="k")]
    if cured:
        assert answers[0].status_code == 201
        assert answers[1].content == answers[0].content
        assert effects() == 1
    else:
        assert {problem_code(answer) for answer in answers} == {"idempotency_outer_transaction"}
        assert "non_atomic_requests" in caplog.text
        assert effects() == 0


# Failure mode 23: transactions of the caller and of the handler


@pytest.mark.failure_mode(23)
@committing
def test_an_open_transaction_around_the_view_is_a_clear_error(
    alice: Caller, serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    serve(transaction.atomic(idempotent("tests.inside")(plain_answer)))
    refused = alice.post(key="k")
    assert refused.status_code == 500
    assert problem_code(refused) == "idempotency_outer_transaction"
    assert "non_atomic_requests" in caplog.text  # the remedy
    assert "tests.inside" in caplog.text
    assert effects() == 0
    assert not IdempotencyRecord.objects.exists()


@pytest.mark.failure_mode(23)
@committing
def test_a_handlers_own_atomic_blocks_are_savepoints(alice: Caller, serve: Serve) -> None:
    @idempotent("tests.savepoints")
    @transaction.atomic
    def view(request: HttpRequest) -> HttpResponse:
        try:
            with transaction.atomic():
                plain_answer(request)
                raise ValueError
        except ValueError:
            pass
        return plain_answer(request)

    serve(view)
    first = alice.post(key="k")
    assert first.status_code == 201
    assert alice.post(key="k").content == first.content
    assert effects() == 1


@pytest.mark.failure_mode(23)
@committing
def test_a_durable_block_in_a_handler_fails_as_django_makes_it_fail(alice: Caller, serve: Serve) -> None:
    @idempotent("tests.durable")
    def view(request: HttpRequest) -> HttpResponse:
        plain_answer(request)
        with transaction.atomic(durable=True):
            return plain_answer(request)

    serve(view)
    for _ in range(2):
        assert alice.post(key="k").status_code == 500
    assert effects() == 0
    assert IdempotencyRecord.objects.get().status == "recoverable"


@pytest.mark.failure_mode(23)
@committing
def test_a_durable_block_in_a_handler_outside_of_a_transaction_is_durable(alice: Caller, serve: Serve) -> None:
    @idempotent("tests.durable", transaction=False, recovery=PARK)
    def view(request: HttpRequest) -> HttpResponse:
        with transaction.atomic(durable=True):
            return plain_answer(request)

    serve(view)
    assert alice.post(key="k").content == alice.post(key="k").content
    assert effects() == 1


# Django's own TestCase wraps every test in a transaction that it never commits


@override_settings(ROOT_URLCONF="tests.http.urls")
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

    async def test_the_async_client_works(self) -> None:
        for kind in ASYNC:
            answers = [
                await self.async_client.post(
                    f"/kinds/{kind}/",
                    {},
                    content_type="application/json",
                    headers={**self.headers, "Idempotency-Key": kind},
                )
                for _ in range(2)
            ]
            assert answers[0].status_code == 201
            assert answers[1].content == answers[0].content
        assert await sync_to_async(effects)() == len(ASYNC)


class ProtectedViewsInTestCaseUnderAtomicRequests(ProtectedViewsInTestCase):
    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        cls.addClassCleanup(connection.settings_dict.__setitem__, "ATOMIC_REQUESTS", False)
        connection.settings_dict["ATOMIC_REQUESTS"] = True


class SampleChargesInAPITestCase(APITestCase):
    def setUp(self) -> None:
        self.client.credentials(HTTP_AUTHORIZATION=f"Token {TokenFactory().key}", HTTP_IDEMPOTENCY_KEY="k")

    def create(self, **data: Any) -> Any:
        return self.client.post("/charges/", {"amount": 1000, "currency": "usd", **data}, format="json")

    def test_a_created_charge_replays(self) -> None:
        first = self.create(reference="r")
        assert first.status_code == 201
        assert self.create(reference="r").content == first.content
        assert Charge.objects.count() == 1

    def test_a_failure_that_is_raised_is_recorded_and_the_test_goes_on(self) -> None:
        refused = self.create(amount=0)
        assert refused.status_code == 400
        replay = self.create(amount=0)
        assert replay.content == refused.content
        assert replay["Idempotency-Replayed"] == "true"
        assert Charge.objects.count() == 0

    def test_an_error_of_the_package_leaves_the_tests_transaction_usable(self) -> None:
        self.create()
        assert self.create(amount=2).status_code == 422
        assert Charge.objects.count() == 1


class SampleChargesInAPITestCaseUnderAtomicRequests(SampleChargesInAPITestCase):
    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        cls.addClassCleanup(connection.settings_dict.__setitem__, "ATOMIC_REQUESTS", False)
        connection.settings_dict["ATOMIC_REQUESTS"] = True
