"""Sequences of public functions match an in-memory model: all short sequences, and random longer ones.

``--count`` sets the number of random sequences.
"""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass, field
from functools import partial

import pytest
from django.db import connection, transaction
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from idempotency import PARK, REEXECUTE, Operation
from idempotency.bodies import encode_body
from idempotency.exceptions import InProgressError, KeyReusedError, LeaseLostError, OutcomeUnknownError
from idempotency.identity.fingerprint import Payload
from idempotency.lifecycle import Status
from idempotency.models import IdempotencyRecord, IdempotencyStep
from idempotency.operate import resolutions, sweep
from idempotency.operate.purge import purge_batches
from idempotency.outbox import publish
from idempotency.outbox.models import OutboxMessage
from idempotency.outbox.relay import relay_once
from idempotency.outcome import Outcome, outcome_of_result
from idempotency.protocol import ownership
from idempotency.protocol.claim import Claim
from idempotency.protocol.context import claim_in_context
from idempotency.store import Fence, store_for
from tests.crash.mutations import MUTATIONS
from tests.database.claiming import acquire
from tests.outbox import SENDER, broker
from tests.records import HOUR, from_now
from tests.results import recording

pytestmark = pytest.mark.django_db(transaction=True)

OPERATIONS = {
    "again": Operation.declare("tests.stateful.again", transaction=False, recovery=REEXECUTE),
    "park": Operation.declare("tests.stateful.park", transaction=False, recovery=PARK),
}
SEQUENCES = 20
#: Outcomes of an attempt: results of a function, and responses of a view.
OUTCOMES = {
    "result": outcome_of_result(1, OPERATIONS["again"].policy),
    "another result": outcome_of_result(2, OPERATIONS["again"].policy),
    "refused": Outcome(402, (("Content-Type", "application/json"),), '{"code": "no"}'),
    "invalid": Outcome(422, (("Content-Type", "text/plain"),), encode_body(b"no", "text/plain")),
    "failed": Outcome(503, (), "{}"),
    "large": Outcome(201, (("Content-Type", "application/json"),), json.dumps("x" * 20_000)),
    "file": Outcome(200, (("Content-Type", "application/octet-stream"),), reference="file 1"),
}
numbers = st.integers(0, 5)
scopes = st.tuples(st.sampled_from(sorted(OPERATIONS)), st.sampled_from("ab"))


@dataclass(eq=False)
class Record:
    payload: int
    attempt: int = 1
    status: str = "in_progress"
    lease_over: bool = False
    #: Whether the claim names a session that is gone. A step renews the lease, and changes nothing about that.
    session_over: bool = False
    retention_over: bool = False
    outcome: Outcome | None = None
    steps: set[str] = field(default_factory=set)
    #: Identifies the request. After its retention, a key stands for a new one.
    life: int = field(default_factory=partial(next, itertools.count()))

    def owned_again(self):
        """An owner or an outcome was written: lease and retention restart."""
        self.lease_over = self.retention_over = False


@dataclass
class Held:
    """A claim that an attempt was given and may have lost."""

    scope: tuple[str, str]
    record: Record
    attempt: int
    claim: Claim
    ended: set[str] = field(default_factory=set)

    def owns(self, records):
        record = self.record
        is_latest = records.get(self.scope) is record and record.attempt == self.attempt
        return is_latest and record.status == "in_progress"


class Machine(RuleBasedStateMachine):
    steps_made = 0

    def __init__(self):
        super().__init__()
        self.records = {}
        self.held = []
        #: How often the message of each operation was sent.
        self.messages = {}
        self.calls = 0
        broker.reset()
        for model in (IdempotencyRecord, IdempotencyStep, OutboxMessage):
            model.objects.all().delete()

    def one(self, number):
        return self.held[number % len(self.held)]

    def stored(self, scope):
        return IdempotencyRecord.objects.get(operation=OPERATIONS[scope[0]].name, idempotency_key=scope[1])

    def some(self, number):
        scope = sorted(self.records)[number % len(self.records)]
        return scope, self.records[scope]

    # A request

    def expected(self, scope, payload):
        """Apply a request to the model. Returns an error, an outcome, or the record that the request now owns."""
        record = self.records.get(scope)
        if record is None:
            self.records[scope] = record = Record(payload)
            return record
        if record.status == "in_progress" and not record.lease_over:
            return InProgressError
        abandoned = record.status == "in_progress"
        unknown = record.status == "parked" or (abandoned and scope[0] == "park")
        if record.retention_over and not unknown:
            record.payload, record.outcome, record.steps, record.life = payload, None, set(), Record(0).life
        elif record.payload != payload:
            return KeyReusedError
        elif record.status == "completed":
            return record.outcome
        elif unknown:
            record.status = "parked"
            return OutcomeUnknownError
        record.attempt += 1
        record.status = "in_progress"
        record.session_over = False
        record.owned_again()
        return record

    @rule(scope=scopes, payload=st.integers(0, 1))
    def ask(self, scope, payload):
        record = self.records.get(scope)
        if record and record.status == "in_progress" and record.session_over and not record.lease_over:
            # A claim's session is only looked for after its first second. Here each claim is older.
            IdempotencyRecord.objects.filter(pk=self.stored(scope).pk).update(lease_expires_at=from_now(HOUR / 120))
            record.lease_over = True
        expected = self.expected(scope, payload)
        if isinstance(expected, type):
            with pytest.raises(expected):
                acquire(OPERATIONS[scope[0]], scope[1], Payload(payload))
            return
        got = acquire(OPERATIONS[scope[0]], scope[1], Payload(payload))
        if isinstance(got, Outcome):
            assert expected == got
        else:
            assert (expected, expected.attempt) == (self.records[scope], got.attempt)
            self.held.append(Held(scope, expected, got.attempt, Claim(got)))

    # An attempt, alive or overtaken

    @precondition(lambda self: self.held)
    @rule(which=numbers, kind=st.sampled_from(sorted(OUTCOMES)))
    def complete(self, which, kind):
        held, outcome = self.one(which), OUTCOMES[kind]
        record = held.record
        mine = self.records.get(held.scope) is record and record.attempt == held.attempt
        is_repeated = mine and (record.status, record.outcome) == ("completed", outcome)
        try:
            ownership.record(held.claim.ownership, outcome)
        except LeaseLostError:
            assert not held.owns(self.records)
            assert not is_repeated
        else:
            assert held.owns(self.records) or is_repeated
            if not is_repeated:
                record.status, record.outcome = "completed", outcome
                record.owned_again()

    @precondition(lambda self: self.held)
    @rule(which=numbers, parks=st.booleans())
    def give_up(self, which, parks):
        held = self.one(which)
        ended = (ownership.park if parks else ownership.release)(held.claim.ownership)
        assert ended is held.owns(self.records)
        if ended:
            held.record.status, held.record.lease_over = "parked" if parks else "recoverable", False

    @precondition(lambda self: self.held)
    @rule(which=numbers)
    def renew(self, which):
        held = self.one(which)
        try:
            held.claim.renew()
        except LeaseLostError:
            assert not held.owns(self.records)
        else:
            assert held.owns(self.records)
            held.record.owned_again()

    @precondition(lambda self: self.held)
    @rule(which=numbers, name=st.sampled_from("xy"))
    def step(self, which, name):
        held, calls = self.one(which), self.calls
        if name in held.ended:
            return

        def call():
            self.calls += 1
            return name

        try:
            assert held.claim.step(name, call) == name
        except LeaseLostError:
            assert not held.owns(self.records)
            assert self.calls == calls
        else:
            assert held.owns(self.records)
            assert self.calls - calls == (name not in held.record.steps)
            held.record.steps.add(name)
            held.ended.add(name)
            held.record.owned_again()

    @precondition(lambda self: self.held)
    @rule(which=numbers, rolls_back=st.booleans())
    def publish(self, which, rolls_back):
        held = self.one(which)
        record = self.records.get(held.scope)
        if record is None:
            return
        held.claim.locks = []  # as while its handler runs
        token = claim_in_context.set(held.claim)
        try:
            with transaction.atomic():
                publish("orders.placed", list(held.scope), name="one", sender=SENDER)
                transaction.set_rollback(rolls_back)
        except LeaseLostError:
            assert held.claim.lost
        else:
            if not rolls_back:
                self.messages.setdefault(record.life, 0)
        finally:
            claim_in_context.reset(token)

    # Time and upkeep

    @precondition(lambda self: self.records)
    @rule(which=numbers)
    def lease_ends(self, which):
        scope, record = self.some(which)
        if record.status == "in_progress":
            record.lease_over = True
            IdempotencyRecord.objects.filter(pk=self.stored(scope).pk).update(lease_expires_at=from_now(-HOUR))

    @precondition(lambda self: self.records)
    @rule(which=numbers)
    def session_ends(self, which):
        """No session has the number 0."""
        scope, record = self.some(which)
        IdempotencyRecord.objects.filter(pk=self.stored(scope).pk).update(session=0)
        ended = store_for("default").end_lease_of_gone_session(Fence.of(self.stored(scope)))
        live = record.status == "in_progress" and not record.lease_over
        names_sessions = store_for("default").session is not None
        assert ended is (live and names_sessions)
        record.lease_over |= ended
        record.session_over = names_sessions

    @precondition(lambda self: self.records)
    @rule(which=numbers)
    def retention_ends(self, which):
        scope, record = self.some(which)
        record.retention_over = True
        IdempotencyRecord.objects.filter(pk=self.stored(scope).pk).update(expires_at=from_now(-HOUR))

    @rule()
    def sweep(self):
        next(sweep.recover_batches())
        for (operation, _), record in self.records.items():
            if record.status == "in_progress" and (record.lease_over or record.session_over):
                record.status = "parked" if operation == "park" else "recoverable"
                record.lease_over = False

    @rule()
    def purge(self):
        over = [key for key, each in self.records.items() if each.retention_over]
        gone = [key for key in over if self.records[key].status in {"completed", "recoverable"}]
        assert next(purge_batches()).deleted == len(gone)
        for key in gone:
            del self.records[key]

    @rule()
    def relay(self):
        relay_once()
        self.messages = dict.fromkeys(self.messages, 1)

    # An operator

    @precondition(lambda self: self.records)
    @rule(which=numbers, decision=st.sampled_from(["not executed", "outcome", "release"]))
    def decide(self, which, decision):
        scope, record = self.some(which)
        may = record.status == "parked"
        try:
            if decision == "not executed":
                resolutions.mark_not_executed(self.stored(scope), by="operator")
            elif decision == "outcome":
                resolutions.record_outcome(self.stored(scope), 7, by="operator")
            else:
                may |= record.status == "in_progress" and record.lease_over
                resolutions.release(self.stored(scope), by="operator")
        except resolutions.ResolutionRefusedError:
            assert not may
            return
        assert may
        if decision == "outcome":
            record.status, record.outcome = "completed", outcome_of_result(7, OPERATIONS[scope[0]].policy)
            record.owned_again()
            return
        record.attempt += record.status == "in_progress"
        record.status, record.lease_over = "recoverable", False

    @invariant()
    def the_table_is_as_the_model(self):
        Machine.steps_made += 1
        stored = {
            (operation.rpartition(".")[2], key): (status, attempt)
            for operation, key, status, attempt in IdempotencyRecord.objects.values_list(
                "operation", "idempotency_key", "status", "attempt"
            )
        }
        assert stored == {scope: (record.status, record.attempt) for scope, record in self.records.items()}
        kept = sum(len(record.steps) for record in self.records.values())
        assert IdempotencyStep.objects.count() == kept
        assert OutboxMessage.objects.count() == len(self.messages)
        assert len(broker.deliveries) == sum(self.messages.values())


def try_sequences(count):
    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=count,
            stateful_step_count=30,
            deadline=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_any_sequence_of_calls_matches_the_model(count, seed):
    before = Machine.steps_made
    with recording("sequences", database=connection.display_name.lower(), seed=seed) as figures:
        try:
            try_sequences(count or SEQUENCES)
        finally:
            figures["calls"] = Machine.steps_made - before
    assert figures["calls"] > 0


def play(*moves):
    """Make these calls, each with its arguments, and compare the table after each."""
    machine = Machine()
    for name, arguments in moves:
        getattr(machine, name)(**arguments)
        machine.the_table_is_as_the_model()


#: Calls that may follow a claim. Its first and its last attempt may end in different ways.
MOVES = [
    ("ask", {"payload": 0}),
    ("complete", {"which": 0, "kind": "refused"}),
    ("complete", {"which": -1, "kind": "result"}),
    ("give_up", {"which": 0, "parks": False}),
    ("lease_ends", {"which": 0}),
    ("retention_ends", {"which": 0}),
    ("sweep", {}),
]
LENGTH = 3


@pytest.mark.parametrize("operation", OPERATIONS)
def test_every_short_sequence_matches_the_model(operation):
    begin, *others = [(name, {"scope": (operation, "a"), **given} if name == "ask" else given) for name, given in MOVES]
    before = Machine.steps_made
    with recording("sequences: short", kind=operation, database=connection.display_name.lower()) as figures:
        for moves in itertools.product([begin, *others], repeat=LENGTH):
            play(begin, *moves)
        figures["calls"] = Machine.steps_made - before
    assert figures["calls"] == len(MOVES) ** LENGTH * (1 + LENGTH)


def test_a_sweep_that_releases_an_operation_to_park_is_detected(monkeypatch):
    moves = [("ask", {"scope": ("park", "a"), "payload": 0}), ("lease_ends", {"which": 0}), ("sweep", {})]
    play(*moves)
    settle = sweep.settle_as
    monkeypatch.setattr(sweep, "settle_as", lambda status, *rest: settle(Status.RECOVERABLE, *rest))
    with pytest.raises(AssertionError):
        play(*moves)


def test_an_unfenced_refusal_by_an_overtaken_attempt_is_detected(monkeypatch):
    ask, over = ("ask", {"scope": ("again", "a"), "payload": 0}), ("lease_ends", {"which": 0})
    moves = [ask, over, ask, ("complete", {"which": 0, "kind": "refused"})]
    play(*moves)
    MUTATIONS["refusal_unfenced"](monkeypatch)
    with pytest.raises(AssertionError):
        play(*moves)
