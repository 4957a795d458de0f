"""Handlers above a protected one: what it is under, if it only has its name and attributes, if it calls it."""

from __future__ import annotations

import functools
import json
from typing import Any

import pytest
from django.db import connection, transaction
from django.http import HttpRequest, HttpResponse
from django.utils.decorators import method_decorator
from django.views import View
from django.views.decorators.cache import never_cache
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView

from idempotency import idempotent
from idempotency.contrib.rest_framework import IdempotentMixin
from idempotency.http.protection import held_by
from tests.http.callers import Caller, effects, problem_code
from tests.http.declaring import runs_once
from tests.http.serving import Serve
from tests.http.views import Methods, PlainView, drf_answer, plain_answer

# Whether a method is protected is decided before the database is asked.
pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.failure_62, pytest.mark.once]


class Paying(View):
    @idempotent("declarations.paying")
    def post(self, request: HttpRequest) -> HttpResponse:
        return plain_answer(request)

    get = PlainView.get


class PayingAPI(APIView):
    @idempotent("declarations.paying_api")
    def post(self, request: Request) -> Response:
        return drf_answer(request)

    get = Methods.get


def copied(base: Any) -> Any:
    answer = drf_answer if issubclass(base, APIView) else plain_answer

    @functools.wraps(base.post)
    def post(self: Any, request: Any) -> Any:
        return answer(request)

    return post


@pytest.mark.failure_77
@pytest.mark.parametrize("base", [Paying, PayingAPI])
@pytest.mark.parametrize("way", ["copied", "copied and decorated"])
def test_a_handler_that_only_copies_the_attributes_of_a_protected_one_is_the_unprotected_view(
    alice: Caller, serve: Serve, atomic: bool, base: Any, way: str
) -> None:
    """It keeps the transaction of ATOMIC_REQUESTS."""
    post = copied(base)
    view: Any = type("Overriding", (base,), {"post": post if way == "copied" else method_decorator(never_cache)(post)})
    serve(view.as_view())
    for _ in range(2):
        answer = alice.post(key="k")
        assert (answer.status_code, "Idempotency-Key" in answer) == (201, False)
        assert json.loads(answer.content)["in_transaction"] == atomic
    assert effects() == 2
    assert alice.post("/?crash=1", key="k").status_code == 500
    assert effects() == (2 if atomic else 3)


@pytest.mark.failure_77
@pytest.mark.parametrize("base", [Paying, PayingAPI])
def test_a_handler_that_the_mixin_names_is_protected_whatever_it_has_copied(
    alice: Caller, serve: Serve, atomic: bool, base: Any
) -> None:
    namespace = {"post": copied(base), "idempotent_operations": {"post": "tests.again"}}
    view: Any = type("Overriding", (IdempotentMixin, base), namespace)
    serve(view.as_view())
    assert runs_once(alice, "POST")


def in_body(decorate: Any) -> Any:
    """Decorate as in the body of the class, where the class can't see what is protected."""

    def post(self: Any, request: Any) -> Any:
        return (plain_answer if isinstance(request, HttpRequest) else drf_answer)(request)

    post.__qualname__ = "Body.post"
    return lambda base: decorate(idempotent("tests.body")(post))


def calling_super(base: Any) -> Any:
    def post(self: Any, request: Any) -> Any:
        return base.post(self, request)

    return post


def custom(handler: Any) -> Any:
    used_up = None

    def timed(*args: Any) -> Any:
        return handler(*args) if args else used_up  # noqa: F821

    @functools.wraps(handler)
    def call(*args: Any) -> Any:
        return timed(*args) if args else call()

    del used_up  # leaves an empty cell, as a variable does that is assigned later
    return call


class Calling:
    """A decorator that is an object."""

    def __init__(self, handler: Any) -> None:
        functools.update_wrapper(self, handler)
        self.handler = handler

    def __call__(self, *args: Any) -> Any:
        return self.handler(*args)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else functools.partial(self, instance)


ABOVE = {
    "override": calling_super,
    "inherited": lambda base: method_decorator(never_cache)(base.post),
    "custom": lambda base: custom(base.post),
    "object": lambda base: Calling(base.post),
    "partial": lambda base: functools.partialmethod(base.post),
    "other": in_body(method_decorator(never_cache)),
}


@pytest.mark.parametrize("base", [Paying, PayingAPI])
@pytest.mark.parametrize("above", ABOVE.values(), ids=ABOVE)
def test_a_handler_that_calls_a_protected_one_is_protected(
    alice: Caller, serve: Serve, atomic: bool, base: Any, above: Any
) -> None:
    serve(type("Overriding", (base,), {"post": above(base)}).as_view())
    assert runs_once(alice, "POST")
    assert alice.post("/?crash=1", key="crash").status_code == 500
    assert effects() == 1


def test_a_decorator_that_does_not_call_the_handler_keeps_its_transaction(
    alice: Caller, serve: Serve, atomic: bool
) -> None:
    def gate(handler: Any) -> Any:
        @functools.wraps(handler)
        def post(self: Any, request: HttpRequest) -> Any:
            return plain_answer(request) if "other" in request.GET else handler(self, request)

        return post

    serve(type("Gated", (Paying,), {"post": gate(Paying.post)}).as_view())
    assert runs_once(alice, "POST")
    assert alice.post("/?other=1&crash=1", key="k").status_code == 500
    assert effects() == (1 if atomic else 2)


@pytest.mark.usefixtures("atomic_requests")
def test_what_is_written_above_a_protected_handler_is_committed_before_its_claim(alice: Caller, serve: Serve) -> None:
    class Writing(Paying):
        def post(self, request: HttpRequest) -> HttpResponse:
            plain_answer(request)
            if "inside" in request.GET:
                with transaction.atomic():
                    return super().post(request)
            answer = super().post(request)
            assert not connection.in_atomic_block
            if "after" in request.GET:
                raise ZeroDivisionError
            return answer

    serve(Writing.as_view())
    assert alice.post(key="k").status_code == 201
    assert effects() == 2
    assert alice.post(key="k")["Idempotency-Replayed"] == "true"
    assert effects() == 3
    assert alice.post("/?after=1", key="after").status_code == 500
    assert effects() == 5
    refused = alice.post("/?inside=1", key="inside")
    assert problem_code(refused) == "idempotency_outer_transaction"


def test_a_bound_method_holds_its_function() -> None:
    assert list(held_by(PlainView().setup)) == [PlainView.setup]


def test_a_name_without_a_value_yet_holds_nothing() -> None:
    def inner() -> Any:
        return later

    assert list(held_by(inner)) == []
    later = 1
    assert list(held_by(inner)) == [1]
