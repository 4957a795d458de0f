"""What protection adds to a request, in messages that PostgreSQL is waited for: read off the wire by libpq itself.

Django's own record of statements names a BEGIN and a COMMIT that were never sent.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from django.db import transaction
from django.http import HttpRequest, HttpResponse, JsonResponse

from idempotency import PARK, REEXECUTE, current_claim, idempotent
from idempotency.models import IdempotencyRecord
from tests.benchmarks.instruments import round_trips
from tests.http.callers import Caller, claim_anew
from tests.http.serving import Serve
from tests.http.views import plain_answer
from tests.records import HOUR, from_now

pytestmark = [pytest.mark.postgres, pytest.mark.django_db(transaction=True)]

#: The work of the view is one statement. With a transaction around it BEGIN and COMMIT are two messages more.
WORK = 1
CLAIM = 1
READ = 1
COMPLETE = 1
BEGIN_AND_COMMIT = 2


def messages(alice: Caller, status: int) -> int:
    """How many messages a request sends, apart from those of its authentication."""

    def ask() -> None:
        assert alice.post(key="k").status_code == status

    def authenticate() -> None:
        assert alice.post("/none/", key="k").status_code == 204

    asked, authenticated = round_trips(ask), round_trips(authenticate)
    if asked is None or authenticated is None:
        pytest.skip("libpq can't trace on this system")  # it can on Linux, where every release is tested
    return asked - authenticated


def serve_with(serve: Serve, **policy: Any) -> None:
    view = idempotent("tests.messages", **policy)(plain_answer)
    serve(view, **{"none/": lambda request: JsonResponse({}, status=204)})


def failing(request: HttpRequest) -> HttpResponse:
    plain_answer(request)
    return JsonResponse({}, status=503)


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ({}, CLAIM + BEGIN_AND_COMMIT + WORK + COMPLETE),
        ({"recovery": PARK}, CLAIM + BEGIN_AND_COMMIT + WORK + COMPLETE),
        ({"transaction": False, "recovery": REEXECUTE}, CLAIM + WORK + COMPLETE),
        ({"transaction": False, "recovery": PARK}, CLAIM + WORK + COMPLETE),
    ],
    ids=["one transaction", "parked", "no transaction", "no transaction, parked"],
)
def test_a_first_execution_sends_one_message_to_claim_and_one_to_complete(
    alice: Caller, serve: Serve, policy: dict[str, Any], expected: int
) -> None:
    serve_with(serve, **policy)
    assert messages(alice, 201) == expected


def test_a_replay_sends_two_messages(alice: Caller, serve: Serve) -> None:
    serve_with(serve)
    alice.post(key="k")
    assert messages(alice, 201) == CLAIM + READ


def test_a_duplicate_of_a_running_request_sends_two_messages(alice: Caller, serve: Serve) -> None:
    serve_with(serve)
    alice.post(key="k")
    claim_anew()
    assert messages(alice, 409) == CLAIM + READ


def test_a_take_over_sends_one_message_more(alice: Caller, serve: Serve) -> None:
    serve_with(serve)
    alice.post(key="k")
    claim_anew()
    IdempotencyRecord.objects.update(lease_expires_at=from_now(-HOUR))
    assert messages(alice, 201) == CLAIM + READ + CLAIM + BEGIN_AND_COMMIT + WORK + COMPLETE


def test_a_release_sends_one_message_after_the_rollback(alice: Caller, serve: Serve) -> None:
    serve(idempotent("tests.messages")(failing), **{"none/": lambda request: JsonResponse({}, status=204)})
    assert messages(alice, 503) == CLAIM + BEGIN_AND_COMMIT + WORK + 1


def test_a_renewal_outside_of_a_transaction_sends_one_message(alice: Caller, serve: Serve) -> None:
    def renewing(request: HttpRequest) -> HttpResponse:
        claim = current_claim()
        assert claim is not None
        claim.renew()
        return plain_answer(request)

    view = idempotent("tests.messages", transaction=False, recovery=PARK, lease=timedelta(seconds=30))(renewing)
    serve(view, **{"none/": lambda request: JsonResponse({}, status=204)})
    assert messages(alice, 201) == CLAIM + 1 + WORK + COMPLETE


def test_what_a_view_does_after_a_claim_is_a_transaction_of_its_own(alice: Caller, serve: Serve) -> None:
    """The connection is as it was: statements commit by themselves, and blocks of the handler's own begin and end."""

    @transaction.atomic
    def atomic(request: HttpRequest) -> HttpResponse:
        return plain_answer(request)

    view = idempotent("tests.messages", transaction=False, recovery=PARK)(atomic)
    serve(view, **{"none/": lambda request: JsonResponse({}, status=204)})
    assert messages(alice, 201) == CLAIM + BEGIN_AND_COMMIT + WORK + COMPLETE
