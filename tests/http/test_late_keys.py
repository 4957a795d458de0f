"""A key that comes too late begins nothing. What is recorded under it is still told."""

from __future__ import annotations

from contextlib import nullcontext
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest
from django.core.exceptions import ImproperlyConfigured

from idempotency import Operation, claim, idempotent
from idempotency.exceptions import KeyExpiredError, KeyInvalidError
from idempotency.identity import keys
from idempotency.identity.keys import new_key
from idempotency.identity.scope import Scope
from idempotency.lifecycle import Status
from idempotency.models import IdempotencyRecord
from idempotency.protocol import claims
from tests.http.callers import Caller, assert_refused, claim_anew, effects, records, replayed
from tests.http.serving import Framework, Serve
from tests.http.test_cost import CLAIM, COMPLETE, LOOK, WORK, authentication, statements
from tests.http.views import plain_answer
from tests.records import HOUR, expire

pytestmark = pytest.mark.django_db(transaction=True)

DAY = timedelta(days=1)
LATE: dict[str, Any] = {"max_key_age": DAY}


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1_800_000_000.0
        monkeypatch.setattr(keys, "time", SimpleNamespace(time_ns=lambda: int(self.now * 1e9)))
        monkeypatch.setattr(claims, "time", SimpleNamespace(time=lambda: self.now))

    def advance(self, duration: timedelta) -> None:
        self.now += duration.total_seconds()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def test_a_key_that_is_too_old_begins_nothing(alice: Caller, framework: Framework, clock: Clock) -> None:
    framework.serve(**LATE)
    key = new_key()
    clock.advance(DAY)
    replayed(alice, key=key)  # it is not older than that
    late = new_key()
    clock.advance(DAY + timedelta(seconds=1))
    refused = assert_refused(alice, "idempotency_key_expired", key=late)
    assert "Retry-After" not in refused
    assert refused["Idempotency-Key"] == late


def test_what_is_recorded_under_an_old_key_is_told(alice: Caller, framework: Framework, clock: Clock) -> None:
    framework.serve(**LATE)
    key = new_key()
    first = alice.post(key=key)
    clock.advance(2 * DAY)
    replay = alice.post(key=key)
    assert (replay.content, replay["Idempotency-Replayed"]) == (first.content, "true")
    assert_refused(alice, "idempotency_key_reused", key=key, data={"amount": 2})
    claim_anew()
    assert_refused(alice, "idempotency_in_progress", key=key)
    IdempotencyRecord.objects.update(status=Status.RECOVERABLE, lease_expires_at=None)
    assert alice.post(key=key).status_code == 201  # the same operation goes on
    expire(IdempotencyRecord.objects.get().pk)
    assert_refused(alice, "idempotency_key_expired", key=key)
    assert (effects(), records()) == (2, [("completed", 2)])
    IdempotencyRecord.objects.all().delete()
    assert_refused(alice, "idempotency_key_expired", key=key)


def test_a_key_from_the_future_begins_nothing(alice: Caller, framework: Framework, clock: Clock) -> None:
    """It would not be old enough when its record is gone."""
    framework.serve(**LATE)
    clock.advance(timedelta(minutes=5))
    ahead = new_key()
    clock.advance(-timedelta(minutes=5))
    replayed(alice, key=ahead)
    clock.advance(timedelta(minutes=5, seconds=1))
    too_far = new_key()
    clock.advance(-timedelta(minutes=5, seconds=1))
    assert_refused(alice, "idempotency_key_invalid", key=too_far)


def test_the_option_decides_about_keys_without_a_time(alice: Caller, framework: Framework, settings: Any) -> None:
    framework.serve(**LATE)
    replayed(alice, key="order-71")
    settings.IDEMPOTENCY = {"TIMED_KEYS": True}
    assert alice.post(key="order-71").status_code == 201  # recorded before
    assert_refused(alice, "idempotency_key_invalid", key="order-72")
    replayed(alice, key=new_key())


SENT = Scope("1", "orders.create", "order-71")
RANDOM = UUID("18817113-3f18-4cae-8b73-d79cc9739af9")


@pytest.mark.parametrize(
    ("key", "begins"),
    [
        (str(SENT.derive_key("ship")), True),
        (str(SENT.derive_key("ship")).upper(), True),
        (SENT.key_for(SENT.derive_key("ship")), True),  # of a message
        (str(RANDOM), False),
        (SENT.key_for(RANDOM), False),
        (SENT.derive_text("ship"), False),
        (f"{SENT.derive_key('ship')}-1", False),
    ],
)
def test_a_derived_key_has_no_time_and_may_begin(key: str, begins: bool) -> None:
    """Each attempt of the operation that sends it sends the same one."""
    with (
        nullcontext() if begins else pytest.raises(KeyInvalidError),
        claim("late.derived", account_id="1", key=key, timed_keys=True, **LATE) as run,
    ):
        run.result = None
    assert len(records()) == begins


def test_a_block_refuses_a_late_key_too(clock: Clock) -> None:
    """A queue that is replayed after a week."""
    message_id = new_key()
    clock.advance(7 * DAY)
    with pytest.raises(KeyExpiredError), claim("late.block", account_id="1", key=message_id, max_key_age=DAY):
        pytest.fail("it ran")
    assert records() == []


@pytest.mark.parametrize("by", ["argument", "setting"])
def test_a_key_may_not_be_accepted_for_longer_than_its_record_is_kept(settings: Any, by: str) -> None:
    Operation("late.fits", max_key_age=DAY, ttl=DAY + timedelta(minutes=5))
    too_long = DAY - timedelta(minutes=4)
    if by == "argument":
        with pytest.raises(ImproperlyConfigured, match=r"gone could run again.*E025"):
            Operation("late.wrong", max_key_age=too_long, ttl=DAY)
        return
    operation = Operation("late.wrong", ttl=DAY)
    settings.IDEMPOTENCY = {"MAX_KEY_AGE": too_long}
    assert [mistake.check_id for mistake in operation.mistakes()] == ["idempotency.E025"]


def test_a_key_in_time_costs_nothing_and_a_late_one_a_read(alice: Caller, serve: Serve, clock: Clock) -> None:
    serve(idempotent("tests.late", **LATE, timed_keys=True)(plain_answer), **{"bare/": plain_answer})
    before = authentication(alice)
    key = new_key()
    with statements() as made:
        assert alice.post(key=key).status_code == 201
    assert made == [*before, *CLAIM, "BEGIN", *WORK, *COMPLETE]
    clock.advance(2 * DAY)
    for late, status in ((key, 201), ("order-71", 400)):
        with statements() as made:
            assert alice.post(key=late).status_code == status
        assert made == [*before, *LOOK]


def test_every_answer_says_how_long_an_outcome_is_kept(alice: Caller, framework: Framework) -> None:
    framework.serve(ttl=HOUR + timedelta(seconds=1.5))
    answers = [
        *replayed(alice),
        assert_refused(alice, "idempotency_key_reused", key="k", data={"amount": 2}),
        assert_refused(alice, "idempotency_payload_invalid", key="n", data=b'{"a": NaN}'),
    ]
    assert [answer["Idempotency-Retention"] for answer in answers] == ["3601"] * 4
    assert "Idempotency-Retention" not in assert_refused(alice, "idempotency_key_missing")
    assert "Idempotency-Retention" not in dict(IdempotencyRecord.objects.get().response_headers or [])
