"""The actors of a schedule. ``judge`` checks what must hold afterwards."""

import json
from functools import partial
from types import SimpleNamespace

from django.contrib.auth import get_user_model
from django.db import OperationalError, connection
from django.http import HttpResponse
from django.test import RequestFactory

from idempotency import PARK, REEXECUTE, Completed, NotExecuted, Operation, Reconcile, current_claim, idempotent
from idempotency.models import IdempotencyRecord
from idempotency.operate.erasure import erase_account
from idempotency.operate.purge import purge_batches
from idempotency.operate.resolutions import ResolutionRefusedError, release
from idempotency.operate.sweep import recover_batches
from idempotency.outbox.models import OutboxMessage
from idempotency.outbox.relay import relay_once
from testproject.models import Transfer
from tests.harness import answers
from tests.orders.judge import Judge
from tests.orders.scheduler import HERE
from tests.outbox import make_messages
from tests.records import HOUR, from_now

ACCOUNT = "1"
SENDER = f"{__name__}.deliver"

#: The effects outside the database: keys of calls, or ids of messages. The provider pays for each call.
outside = []
#: Determines which answers the attempts of a schedule draw.
drawing = SimpleNamespace(number=0)


def act_outside(key):
    if actor := getattr(HERE, "actor", None):
        actor.before("an effect outside")
    outside.append(key)


def deliver(message):
    act_outside(str(message.message_id))


def find_out(record):
    key = str(record.derive_key("call"))
    return Completed(answers.answer(record, "created", effect=key)) if key in outside else NotExecuted()


def handle(request):
    claim = current_claim()
    assert claim is not None
    inside = connection.in_atomic_block
    if inside:
        effect = str(Transfer.objects.create(account_id=1, amount=1, label="effect").pk)
    else:
        effect = str(claim.derive_key("call"))
        act_outside(effect)
    kind = answers.draw(list(answers.KINDS) if inside else answers.KEPT, drawing.number + claim.attempt)
    return answers.answer(claim, kind, effect=effect)


DECLARED = {
    "inside": {},
    "again": {"transaction": False, "recovery": REEXECUTE},
    "ask": {"transaction": False, "recovery": Reconcile(find_out)},
    "park": {"transaction": False, "recovery": PARK},
}
VIEWS = {
    name: idempotent(
        Operation.declare(f"tests.orders.{name}", account=lambda request: ACCOUNT, **answers.DECLARED, **options)
    )(handle)
    for name, options in DECLARED.items()
}


# Actors


def request(declaration, payload=1):
    headers = {"Idempotency-Key": "k"}
    body = json.dumps(payload)
    return VIEWS[declaration](RequestFactory().post("/", body, content_type="application/json", headers=headers))


def another_payload(declaration):
    return request(declaration, 2)


def lease_ends(*_):
    _move_clock("lease_expires_at", status="in_progress")


def retention_ends(*_):
    _move_clock("expires_at")


def _move_clock(column, **where):
    for _ in range(5):
        try:
            IdempotencyRecord.objects.filter(**where).update(**{column: from_now(-HOUR)})
            return
        except OperationalError:  # REPEATABLE READ refuses a row changed since the snapshot; a clock is never refused
            continue


def late(act):
    """The actor, after the end of the lease."""

    def acted(declaration):
        lease_ends()
        return act(declaration)

    acted.__name__ = f"late {act.__name__}"
    return acted


def sweep(*_):
    next(recover_batches())


def purge(*_):
    next(purge_batches())


def purge_past_retention(*_):
    retention_ends()
    next(purge_batches())


def release_all(*_):
    for record in IdempotencyRecord.objects.all():
        try:
            release(record, by="operator")
        except ResolutionRefusedError:
            continue


def erase(*_):
    erase_account(ACCOUNT, by="operator")


def relay(*_):
    relay_once()


#: The actors of a pair.
PAIRS = {
    "two requests": (request, request),
    "another payload": (request, another_payload),
    "a sweep": (request, late(sweep)),
    "a purge": (request, purge_past_retention),
    "an operator's release": (request, late(release_all)),
    "an erasure": (request, erase),
    "a take-over": (request, late(request)),
    # Only the provider can refuse the call of a process that sleeps past its lease, so no lease ends here.
    "a reconciler": (request, sweep),
    "two relays": (relay, relay),
}
#: The actors that a random walk draws, in addition to one request.
WALKERS = (
    *(request, request, late(request), another_payload, late(sweep), sweep, purge_past_retention, purge),
    *(late(release_all), erase, lease_ends),
)


class Schedule(Judge):
    """Actors, and the results of one order of their steps.

    :param draw: determines the answers of the attempts.
    """

    def __init__(self, declaration, acts, draw=0):
        super().__init__(declaration, len(acts), erase in acts)
        self.acts, self.draw, self.order = acts, draw, ""

    def play(self, scheduler, choose, prepare=lambda _: None):
        empty()
        drawing.number = self.draw
        prepare(self.declaration)
        self.look()
        calls = [partial(act, self.declaration) for act in self.acts]
        actors, self.order = scheduler.run(calls, choose, self.look)
        for actor in actors:
            if actor.error is not None:
                self.problems.append(f"an actor raised {actor.error!r}")
            if actor.is_open:
                self.problems.append("a transaction was left open")
            if isinstance(actor.result, HttpResponse):
                self.answers.append(actor.result)
        if relay in self.acts:
            self.judge_messages(outside)
        else:
            self._settle()
            self.judge_record(outside)
        return self

    def _settle(self):
        """Retry after the lease until the outcome is known."""
        for ask in (request, another_payload) * 2:  # the key may belong to either
            lease_ends()
            self.answers.append(ask(self.declaration))
            self.look()
            seen = self.history[-1]
            if seen is None or seen.status in {"completed", "parked"}:
                return
        self.problems.append(f"P7: no request gets the outcome: {self.answers[-1].content!r}")

    def __str__(self):
        names = [act.__name__ for act in self.acts]
        return f"{self.declaration} {names}, draw {self.draw}, order {self.order}: {'; '.join(self.problems) or 'ok'}"


def empty():
    outside.clear()
    if not get_user_model().objects.filter(pk=1).exists():
        get_user_model().objects.create(pk=1, username="of all orders")
    for model in (IdempotencyRecord, OutboxMessage, Transfer):
        with connection.cursor() as cursor:
            cursor.execute(f"DELETE FROM {model._meta.db_table}")


def nothing(declaration):
    """Begin with a new key."""


def abandoned(declaration):
    """Leave a claim whose process died after its call."""
    request(declaration)
    IdempotencyRecord.objects.update(
        status="in_progress", response_status=None, response_headers=None, response_body=None, response_reference=None,
        completed_at=None, lease_expires_at=from_now(-HOUR),
    )  # fmt: skip
    Transfer.objects.all().delete()


def abandoned_before(declaration):
    """Leave a claim whose process died before its call."""
    abandoned(declaration)
    outside.clear()


def completed_long_ago(declaration):
    request(declaration)
    retention_ends()


def abandoned_long_ago(declaration):
    abandoned(declaration)
    retention_ends()


def messages(declaration):
    make_messages(4, sender=SENDER)


#: The pairs to play, each with its declaration and its initial state.
PLAYED = [
    *(("two requests", declaration, nothing) for declaration in DECLARED),
    ("another payload", "inside", nothing),
    *(("a sweep", declaration, nothing) for declaration in ("inside", "again", "park")),
    *(("a purge", "inside", before) for before in (nothing, completed_long_ago)),
    ("an operator's release", "inside", nothing),
    ("an erasure", "inside", nothing),
    *(("a take-over", declaration, nothing) for declaration in ("inside", "again", "park")),
    *(("a reconciler", "ask", before) for before in (abandoned, abandoned_before, abandoned_long_ago)),
    ("two relays", "", messages),
]
