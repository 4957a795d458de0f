"""The purge deletes responses past a retention of their own, in bounded batches, and keeps their records."""

from __future__ import annotations

import pytest
from django.db import transaction

from idempotency.lifecycle import Status
from idempotency.models import IdempotencyRecord, IdempotencyStep
from idempotency.operate.purge import purge_body_batches
from idempotency.outcome import BODY_GONE
from idempotency.protocol.faults import fault_point
from tests.commands import run_command
from tests.concurrency.racing import elsewhere, race
from tests.database.statements import before_statement
from tests.outbox import make_messages
from tests.records import HOUR, from_now, make_bodies, make_records

pytestmark = pytest.mark.django_db(transaction=True)


def gone() -> set[int]:
    bodies = IdempotencyRecord.objects.filter(body_expires_at=None).values_list("pk", "response_body")
    return {pk for pk, body in bodies if body == BODY_GONE}


def purge(batch_size: int = 5000) -> list[int]:
    return [batch.deleted for batch in purge_body_batches(batch_size=batch_size)]


def test_batches_take_what_is_due_oldest_first_and_leave_the_rest_of_the_record() -> None:
    newest, oldest = make_bodies(5), make_bodies(5, due=2 * HOUR)
    make_bodies(1, due=-HOUR)  # is not due yet
    make_records(1, expires=HOUR)  # is kept as long as its record
    IdempotencyRecord.objects.filter(pk__in=make_bodies(1)).update(status=Status.PARKED)  # is not completed
    before = IdempotencyRecord.objects.values().get(pk=oldest[0])
    batches = purge_body_batches(batch_size=4)
    assert next(batches).deleted == 4
    assert gone() < {*oldest}
    assert [(batch.deleted, batch.exhausted) for batch in batches] == [(4, False), (2, True)]
    assert gone() == {*oldest, *newest}
    changed = {"response_body": BODY_GONE, "response_headers": [], "error": None, "body_expires_at": None}
    assert IdempotencyRecord.objects.values().get(pk=oldest[0]) == before | changed


def test_purges_at_once_share_the_work() -> None:
    make_bodies(60)
    # SQLite and MariaDB lock nothing while they look, so one may find what another one has taken, and end.
    shares = race([lambda: sum(purge(batch_size=7))] * 4)
    assert sum(shares) + sum(purge()) == len(gone()) == 60


def test_a_record_that_is_claimed_anew_between_finding_and_deleting_stays_as_it_is() -> None:
    revived, *others = make_bodies(3)

    def claim_anew() -> None:
        IdempotencyRecord.objects.filter(pk=revived).update(status=Status.IN_PROGRESS)

    with before_statement("response_headers", claim_anew):
        assert purge() == [2]
    assert gone() == {*others}


def test_what_the_steps_tell_is_deleted_with_the_response() -> None:
    due, kept = make_bodies(1) + make_bodies(1, due=-HOUR)
    for pk in (due, kept):
        IdempotencyStep.objects.create(account_id="1", record_id=pk, name="charge", result="1")
    assert purge() == [1]
    assert IdempotencyStep.objects.get().record_id == kept


@pytest.mark.postgres
def test_a_record_that_is_locked_is_passed_over_without_waiting() -> None:
    locked, *free = make_bodies(3)
    with transaction.atomic():
        IdempotencyRecord.objects.filter(pk=locked).update(error="is written at this moment")
        # A batch that takes nothing is the last one, so that a loop over batches ends.
        assert elsewhere(lambda: purge(1)) == [1, 1, 0]
    assert gone() == {*free}


def test_a_batch_that_is_cut_off_before_its_commit_has_deleted_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    make_bodies(3)

    def die() -> None:
        raise SystemExit

    with monkeypatch.context() as patch:
        patch.setitem(fault_point, "purge.selected", die)
        with pytest.raises(SystemExit):
            purge()
    assert gone() == set()
    assert purge() == [3]


# The command


def test_the_command_purges_records_then_responses_then_messages() -> None:
    make_bodies(2)
    make_records(1)
    make_messages(1, "sent", sent=-96 * HOUR)
    both = make_bodies(1)
    IdempotencyRecord.objects.filter(pk__in=both).update(expires_at=from_now(-HOUR))  # is purged as a whole
    lines = ["2 records", "2 recorded responses", "1 sent message"]
    for options, verb in (({"dry_run": True}, "Would purge"), ({}, "Purged")):
        assert run_command("purge_idempotency", **options)[:2] == (
            0,
            [f"{verb} {line} from database 'default'." for line in lines],
        )
    assert len(gone()) == IdempotencyRecord.objects.count() == 2


@pytest.mark.parametrize(("bodies", "more"), [(5, True), (4, False)], ids=["more is due", "the last batch was full"])
def test_a_run_tells_whether_it_has_left_responses(bodies: int, more: bool) -> None:
    make_bodies(bodies)
    code, lines, _ = run_command("purge_idempotency", batch_size=2, max_batches=2)
    assert (code, "Stopped by --max-batches 2. More is due." in lines) == ((3, True) if more else (0, False))
    assert len(gone()) == 4
