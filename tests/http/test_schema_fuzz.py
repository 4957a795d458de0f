"""Requests that schemathesis makes from a schema give a protected operation no server error that its twin doesn't have.

The schema is the one that clients download. The requests are some that it allows, and some that it doesn't.
"""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest
import requests
from django.http import HttpRequest
from django.urls import path
from hypothesis import HealthCheck, Phase, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from idempotency import idempotent
from idempotency.identity.keys import HEADER
from testproject.authentication import TokenAuthentication
from testproject.models import MAX_AMOUNT, Transfer
from tests.http.callers import Caller

ninja = pytest.importorskip("ninja", reason="Django Ninja is not installed")
schemathesis = pytest.importorskip("schemathesis", reason="schemathesis is not installed")

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.once]

fuzz = hypothesis_settings(
    max_examples=25,  # of each operation, and others in each run
    deadline=None,  # the database sets the pace
    phases=[Phase.explicit, Phase.reuse, Phase.generate],  # schemathesis' requests take minutes to shrink
    suppress_health_check=list(HealthCheck),  # schemathesis filters what it makes
    print_blob=True,
)


class TransferIn(ninja.Schema):
    amount: int = ninja.Field(ge=1, le=MAX_AMOUNT)
    label: str = ninja.Field("", max_length=128)
    parts: list[dict[str, Any]] = ninja.Field(default_factory=list)


def transfer(request: HttpRequest, recipient: str, payload: TransferIn, urgent: bool = False) -> Any:
    made = Transfer.objects.create(
        account=request.user, recipient=recipient, amount=payload.amount, label=payload.label
    )
    return {"id": made.pk, "urgent": urgent, "parts": payload.parts}


def authenticate(request: HttpRequest) -> Any:
    """Ninja's authentication by our callers' tokens."""
    found = TokenAuthentication().authenticate(request)  # type: ignore[arg-type]
    if found is not None:
        request.user, _ = found
    return found


@pytest.fixture
def ninja_routes(settings: Any) -> None:
    """A protected route of Ninja's, and its twin, in place of the sample project's routes."""
    api = ninja.NinjaAPI(auth=authenticate, urls_namespace="fuzz")
    api.post("/transfers/{recipient}/", response={201: dict[str, Any]})(idempotent("tests.fuzzed")(transfer))
    api.post("/unprotected/transfers/{recipient}/", response={201: dict[str, Any]})(transfer)
    settings.ROOT_URLCONF = (path("", api.urls),)


def test_the_sample_projects_schema_leads_to_no_server_error_that_the_twin_does_not_give(alice: Caller) -> None:
    compare(alice, "/schema/?format=json", {"/charges/", "/orders/"})


@pytest.mark.usefixtures("ninja_routes")
def test_ninjas_schema_leads_to_no_server_error_that_the_twin_does_not_give(alice: Caller) -> None:
    compare(alice, "/openapi.json", {"/transfers/{recipient}/"})


def compare(caller: Caller, schema_url: str, protected: set[str]) -> None:
    """Send what the schema of a URL says to each protected operation."""
    document = json.loads(caller.get(schema_url).content)
    described = {
        route
        for route, operations in document["paths"].items()
        if any(parameter["name"] == HEADER for parameter in operations.get("post", {}).get("parameters", ()))
    }
    assert described == protected
    schema = schemathesis.openapi.from_dict(document)
    for route in sorted(protected):
        answers = fuzz_operation(caller, schema[route]["POST"])
        assert {201, 400} <= answers.keys(), answers  # requests came through to the handler, and to the key's check


def fuzz_operation(caller: Caller, operation: Any) -> Counter[int]:
    """Send requests to a protected operation, twice each. What gets a server error goes to its twin, too.

    :returns: how often each status was answered.
    """
    answers: Counter[int] = Counter()
    modes = [operation.as_strategy(generation_mode=mode) for mode in schemathesis.GenerationMode]

    @fuzz
    @given(case=st.one_of(*modes))
    def run(case: Any) -> None:
        for _ in range(2):
            status = send(caller, case)
            answers[status] += 1
            if status >= 500:
                assert send(caller, case, "/unprotected") >= 500

    run()
    return answers


def send(caller: Caller, case: Any, prefix: str = "") -> int:
    """Send a request as schemathesis would, but with the caller's token; the status of its answer."""
    sent = requests.Request(**case.as_transport_kwargs(base_url="http://testserver")).prepare()
    headers = {name: value for name, value in sent.headers.items() if name not in {"Authorization", "Content-Length"}}
    content_type = headers.pop("Content-Type", "")
    body = sent.body.encode() if isinstance(sent.body, str) else sent.body or b""
    url = f"{prefix}{sent.path_url}"
    answer = caller.request(str(sent.method), url, body, content_type=content_type, headers=headers)
    status: int = answer.status_code
    return status
