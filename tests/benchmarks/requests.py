"""First executions and replays of one small operation: bare view, hand-written protection, this package."""

from __future__ import annotations

import random
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from django.contrib.auth.models import User
from django.db import connection
from rest_framework.test import APIRequestFactory, force_authenticate

from testproject.models import Transfer

from . import views
from .instruments import Cost, measure_block, relative, round_trips
from .report import Table, bytes_of, count, microseconds, milliseconds, times

BODY = {"recipient": "acct_1", "amount": 1250, "label": "benchmark"}
#: Few enough that a round is over in a moment.
BLOCK = 5


@dataclass(frozen=True)
class Variant:
    name: str
    view: type[Any]


BASELINE = Variant("hand-written", views.HandwrittenView)
PACKAGE = Variant("**this package**", views.PackageView)
FIRST_EXECUTIONS = (
    Variant("bare view, autocommit", views.BareView),
    Variant("bare view, own `atomic()`", views.BareAtomicView),
    BASELINE,
    Variant("hand-written, claim waits for the disk", views.HandwrittenDurableView),
    Variant("hand-written, claim in `atomic()`", views.HandwrittenAtomicView),
    Variant("hand-written, claim and read in one statement", views.HandwrittenOneStatementView),
    PACKAGE,
    Variant("this package, claim waits for the disk", views.PackageDurableView),
    Variant("this package, view has its own `atomic()`", views.PackageAtomicView),
)
REPLAYS = (
    BASELINE,
    Variant("hand-written, claim in `atomic()`", views.HandwrittenAtomicView),
    Variant("hand-written, claim and read in one statement", views.HandwrittenOneStatementView),
    PACKAGE,
)


def compare(operations: int, seed: int, progress: Callable[[str], None]) -> list[Table]:
    """Measure every variant ``operations`` times, in blocks in random order, so that noise hits all alike."""
    lots = random.Random(seed)
    with tables():
        caller = Caller(account())
        first = {variant: Cost() for variant in FIRST_EXECUTIONS}
        replayed = {variant: Cost() for variant in REPLAYS}
        rounds = max(1, operations // BLOCK)
        for variant in FIRST_EXECUTIONS:  # imports, caches of the framework, and of the server for its statements
            for _ in range(BLOCK):
                caller.calling(variant)()
            first[variant].round_trips = round_trips(caller.calling(variant))
        keys = {variant: [caller.new_key() for _ in range(BLOCK + 1)] for variant in REPLAYS}
        for variant in REPLAYS:
            for key in keys[variant] * 2:  # the first execution, and one replay to warm up
                caller.calling(variant, key)()
            replayed[variant].round_trips = round_trips(caller.calling(variant, keys[variant][0]))
        for number in range(rounds):
            progress(f"requests, round {number + 1} of {rounds}")
            for variant in lots.sample(FIRST_EXECUTIONS, len(FIRST_EXECUTIONS)):
                with effects(BLOCK + 1):
                    measure_block(first[variant], [caller.calling(variant) for _ in range(BLOCK + 1)])
            for variant in lots.sample(REPLAYS, len(REPLAYS)):
                with effects(0):
                    measure_block(replayed[variant], [caller.calling(variant, key) for key in keys[variant]])
    return [_table("First execution", first), _table("Replay", replayed)]


def account() -> User:
    """Whose requests they are. An experiment may run after another one, on the same database."""
    return User.objects.get_or_create(username="benchmark")[0]


class Caller:
    """Calls a view in this process as a router would, without a server, a middleware or a token to look up."""

    def __init__(self, user: User) -> None:
        self.user = user
        self.factory = APIRequestFactory()

    @staticmethod
    def new_key() -> str:
        return str(uuid.uuid4())

    def calling(self, variant: Variant, key: str | None = None) -> Callable[[], None]:
        """A call of the variant that must succeed."""
        ask = self.asking(variant, key or self.new_key())

        def call() -> None:
            status = ask()
            assert status == 201, status

        return call

    def asking(self, variant: Variant, key: str, **meta: Any) -> Callable[[], int]:
        """A call that returns the response's status. Its request is made already, and so isn't timed."""
        view = variant.view.as_view()
        request = self.factory.post("/transfers/", BODY, format="json", HTTP_IDEMPOTENCY_KEY=key, **meta)
        force_authenticate(request, self.user)

        def ask() -> int:
            response = view(request)
            if not getattr(response, "is_rendered", True):
                response.render()
            return int(response.status_code)

        return ask


@contextmanager
def tables() -> Iterator[None]:
    with connection.cursor() as cursor:
        cursor.execute(views.DROP_TABLE)
        cursor.execute(views.CREATE_TABLE)
    try:
        yield
    finally:
        with connection.cursor() as cursor:
            cursor.execute(views.DROP_TABLE)


@contextmanager
def effects(expected: int) -> Iterator[None]:
    """Whatever is fast must be right as well."""
    before = Transfer.objects.count()
    yield
    effects = Transfer.objects.count() - before
    assert effects == expected, f"{effects} effects instead of {expected}"


def _table(title: str, costs: dict[Variant, Cost]) -> Table:
    base = costs[BASELINE]
    table = Table(
        title,
        ("", "median", "p95", "wall", "CPU client", "CPU server", "CPU", "WAL", "WAL", "fsyncs", "round trips"),
        note="The columns with × are relative to the row `hand-written`; CPU × is of client and server together.",
    )
    for variant, cost in costs.items():
        table.add(
            variant.name,
            milliseconds(cost.median),
            milliseconds(cost.p95),
            times(relative(cost.block_seconds, base.block_seconds)),
            microseconds(cost.client),
            microseconds(cost.server),
            times(relative(cost.block_cpu, base.block_cpu)),
            bytes_of(cost.wal),
            times(cost.wal / base.wal if base.wal else None),
            f"{cost.fsyncs_each:.2f}",
            count(cost.round_trips),
        )
    return table
