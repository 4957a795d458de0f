"""A framework that the package has never heard of is an adapter, and needs nothing else."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from django.http import HttpRequest, HttpResponse, JsonResponse

from idempotency import idempotent
from idempotency.exceptions import IdempotencyError
from idempotency.http.adapter import Adapter, adapter_for, register, unregister
from idempotency.operation import Policy
from idempotency.outcome import Outcome
from tests.http.callers import Caller, effects, replayed
from tests.http.serving import Serve
from tests.http.views import CrashError, work

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.once]


class RefusedError(Exception):
    """How handlers of the toy framework say no."""


class ToyRequest:
    """What handlers of the toy framework are called with."""

    def __init__(self, http: HttpRequest) -> None:
        self.http = http
        self.method = http.method
        self.user = http.user
        self.GET = http.GET


def toy_view(handler: Any) -> Any:
    """The toy framework: handlers take a ``ToyRequest``, return dictionaries and raise ``RefusedError``."""

    def view(http: HttpRequest) -> HttpResponse:
        request = ToyRequest(http)
        try:
            answer = handler(request)
        except RefusedError as error:
            answer = {"refused": str(error), "status": 409}
        return answer if isinstance(answer, HttpResponse) else toy_response(answer)

    return view


def toy_response(answer: dict[str, Any]) -> JsonResponse:
    response = JsonResponse({"toy": answer}, status=answer.get("status", 200))
    response.toy = answer  # type: ignore[attr-defined]
    return response


class ToyAdapter(Adapter):
    @classmethod
    def speaks_for(cls, request: object) -> bool:
        return isinstance(request, ToyRequest)

    def __init__(self, request: Any) -> None:
        super().__init__(request, http=request.http)

    def payload(self, policy: Policy) -> object:
        return json.loads(self.http.body)["command"]

    def render(self, answer: Any) -> Any:
        return toy_response(answer) if isinstance(answer, dict) else answer

    def answer_to_exception(self, error: Exception) -> Any | None:
        if isinstance(error, RefusedError):
            return toy_response({"refused": str(error), "status": 409})
        return super().answer_to_exception(error)

    def answer_to_error(self, error: IdempotencyError) -> Any:
        return toy_response({"code": error.code, "status": error.status_code})

    def replay(self, outcome: Outcome) -> Any:
        response = super().replay(outcome)
        response.toy = json.loads(response.content)["toy"]
        return response


@pytest.fixture(autouse=True)
def _registered() -> Iterator[None]:
    register(ToyAdapter)
    yield
    unregister(ToyAdapter)


@pytest.fixture
def toy(serve: Serve) -> None:
    @serve
    @toy_view
    @idempotent("tests.toy")
    def view(request: ToyRequest) -> Any:
        answer, _ = work(request)
        if "refuse" in request.GET:
            raise RefusedError("no")
        return {"id": answer["id"], "status": 201}


@pytest.mark.usefixtures("toy")
def test_a_handler_of_a_third_framework_runs_once_and_is_replayed(alice: Caller) -> None:
    first, _ = replayed(alice, data={"command": 1})
    assert (first.status_code, first.toy["status"], first["Idempotency-Key"]) == (201, 201, "k")
    again = alice.post(data={"command": 1, "not compared": True}, key="k")
    assert (again.content, again.toy) == (first.content, first.toy)
    # It tells our errors in its own way.
    assert alice.post(data={"command": 2}, key="k").toy["code"] == "idempotency_key_reused"
    assert alice.post(data={"command": 1}).toy["code"] == "idempotency_key_missing"
    assert effects() == 1


@pytest.mark.usefixtures("toy")
def test_a_refusal_of_a_third_framework_is_recorded_and_its_crash_is_not(alice: Caller) -> None:
    refused, _ = replayed(alice, "/?refuse=1", {"command": 1}, wrote=0)
    assert (refused.status_code, refused.toy["refused"]) == (409, "no")
    assert alice.post("/?crash=1", data={"command": 1}, key="crash").status_code == 500
    assert effects() == 0


def test_the_adapter_registered_last_is_asked_first(rf: Any) -> None:
    class Later(ToyAdapter):
        """Speaks for the same requests."""

    http = rf.post("/")
    http.user = None
    request = ToyRequest(http)
    assert type(adapter_for(request)) is ToyAdapter
    register(Later)
    register(ToyAdapter)  # again, as by a module that is imported twice: it stays where it is
    try:
        assert type(adapter_for(request)) is Later
    finally:
        unregister(Later)
        unregister(Later)
    assert type(adapter_for(request)) is ToyAdapter


def test_django_itself_is_asked_last_and_a_crash_is_no_answer_of_it(rf: Any) -> None:
    assert adapter_for("request") is None
    adapter = adapter_for(rf.post("/"))
    assert type(adapter) is Adapter
    assert adapter.answer_to_exception(CrashError()) is None
    assert adapter.http is adapter.request
