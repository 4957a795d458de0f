"""Transactions that are already there: ATOMIC_REQUESTS, and ``atomic()`` around a view and within it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from django.db import transaction
from django.http import HttpRequest, HttpResponse
from django.utils.decorators import method_decorator
from django.views import View
from django.views.decorators.cache import never_cache

from idempotency import idempotent
from tests.http.callers import Caller, assert_refused, effects, records, replayed
from tests.http.serving import OUTSIDE, Serve
from tests.http.views import KINDS, VIEWSETS, AsyncMethodView, PlainView, async_answer, plain_answer

ASYNC = ("async_function", "async_method")

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.urls("tests.http.views"), pytest.mark.scenario_20]


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ASYNC])
def test_what_passes_through_has_the_transaction_of_atomic_requests(alice: Caller, kind: str, atomic: bool) -> None:
    url = f"/kinds/{kind}/"
    answer = json.loads(alice.get(url, key="k").content)
    assert (answer["operation"], answer["in_transaction"]) == (None, atomic)
    assert alice.get(f"{url}?crash=1", key="k").status_code == 500
    assert effects() == (1 if atomic else 2)
    assert records() == []


@pytest.mark.usefixtures("atomic_requests")
@pytest.mark.parametrize(
    "url", ["/", "/bare/", *(f"/unprotected/{view.__name__}/" for view in VIEWSETS)], ids=lambda url: url.strip("/")
)
def test_what_is_not_protected_keeps_its_transaction(alice: Caller, serve: Serve, url: str, settings: Any) -> None:
    """Without an optional key, beside protected views, and as another action of a protected ViewSet."""
    if not url.startswith("/unprotected/"):
        serve(idempotent("tests.optional", required=False)(plain_answer), **{"bare/": plain_answer})
    key = None if url == "/" else "k"
    answer = json.loads(alice.post(url, key=key).content)
    assert (answer["operation"], answer["in_transaction"]) == (None, True)
    assert alice.post(f"{url}?crash=1", key=key).status_code == 500
    assert effects() == 1
    assert records() == []


@pytest.mark.parametrize("kind", ASYNC)
def test_what_passes_through_an_async_view_has_no_transaction(alice: Caller, kind: str) -> None:
    assert not json.loads(alice.get(f"/kinds/{kind}/").content)["in_transaction"]
    assert alice.get(f"/kinds/{kind}/?crash=1").status_code == 500
    assert effects() == 2


@pytest.mark.usefixtures("atomic_requests")
@pytest.mark.parametrize("kind", [*ASYNC, "without a key"])
def test_what_passes_through_an_async_view_is_refused_as_django_refuses_it(
    alice: Caller, serve: Serve, kind: str, transport: str, caplog: pytest.LogCaptureFixture
) -> None:
    alice.transport = transport
    optional: Any = idempotent("tests.optional", required=False)(async_answer)
    serve(optional if kind == "without a key" else KINDS[kind][0])
    refused = alice.request("POST" if kind == "without a key" else "GET")
    assert refused.status_code == 500
    assert "You cannot use ATOMIC_REQUESTS with async views." in caplog.text
    assert effects() == 0


@pytest.mark.usefixtures("atomic_requests")
@pytest.mark.parametrize("kind", ASYNC)
def test_an_async_view_that_the_project_has_exempted_passes_through(alice: Caller, serve: Serve, kind: str) -> None:
    view: Any = AsyncMethodView.as_view() if kind == "async_method" else idempotent("tests.async")(async_answer)
    serve(transaction.non_atomic_requests(view))
    got = alice.get()
    assert got.status_code == 201
    assert not json.loads(got.content)["in_transaction"]
    assert json.loads(alice.post(key="k").content)["in_transaction"]


@pytest.mark.usefixtures("atomic_requests")
def test_a_class_whose_as_view_is_protected_as_a_whole_has_no_transaction(alice: Caller, serve: Serve) -> None:
    class Whole(PlainView):
        @classmethod
        def as_view(cls, **initkwargs: Any) -> Any:
            return idempotent("tests.whole")(super().as_view(**initkwargs))

        @idempotent("tests.put")
        def put(self, request: HttpRequest) -> HttpResponse:
            raise NotImplementedError

    serve(Whole.as_view())
    replayed(alice)


@pytest.mark.usefixtures("atomic_requests")
def test_outside_of_a_transaction_means_outside_under_atomic_requests_too(alice: Caller, serve: Serve) -> None:
    serve(idempotent("tests.outside_atomic", **OUTSIDE)(plain_answer))
    first, _ = replayed(alice)
    assert not json.loads(first.content)["in_transaction"]


class Hidden(View):
    """Another decorator hides from the class what is protected."""

    @method_decorator(never_cache)
    @idempotent("atomic.hidden")
    def post(self, request: HttpRequest) -> HttpResponse:
        return plain_answer(request)


@pytest.mark.failure_23
@pytest.mark.usefixtures("atomic_requests")
@pytest.mark.parametrize("view", [Hidden.as_view(), transaction.atomic(idempotent("atomic.inside")(plain_answer))])
def test_an_open_transaction_around_the_view_is_an_error_that_names_the_remedy(
    alice: Caller, serve: Serve, view: Any, caplog: pytest.LogCaptureFixture
) -> None:
    serve(view)
    assert_refused(alice, "idempotency_outer_transaction", key="k")
    assert "put @idempotent directly on the function or method" in caplog.text
    assert "non_atomic_requests" in caplog.text
    assert "atomic." in caplog.text  # the operation
    # The remedy works.
    serve(transaction.non_atomic_requests(Hidden.as_view()))
    replayed(alice)
