"""First executions and replays of one small operation: bare view, hand-written protection, this package."""

from __future__ import annotations

import random
import statistics
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from django.contrib.auth.models import User
from rest_framework.test import APIRequestFactory, force_authenticate

from testproject.models import Transfer

from . import views
from .instruments import Cost, measure_block, p95, relative, round_trips
from .report import Table, bytes_of, count, microseconds, milliseconds, times

BODY = {"recipient": "acct_1", "amount": 1250, "label": "benchmark"}
#: Operations of a variant in a round. Few, so that the variants of a round run shortly after each other.
BLOCK = 5


@dataclass(frozen=True)
class Variant:
    name: str
    view: type[Any]


BASELINE = Variant("hand-written", views.HandwrittenView)
PACKAGE = Variant("**this package**", views.PackageView)
BARE_ATOMIC = Variant("bare view, own `atomic()`", views.BareAtomicView)
PACKAGE_ATOMIC = Variant("this package, view has its own `atomic()`", views.PackageAtomicView)
NARROW = Variant("hand-written, narrow record", views.HandwrittenNarrowView)
PROMISES = Variant("hand-written, with the same promises", views.HandwrittenPromisesView)
FIRST_EXECUTIONS = (
    BARE_ATOMIC,
    NARROW,
    BASELINE,
    PROMISES,
    PACKAGE,
    Variant("this package, claim waits for the disk", views.PackageDurableView),
    PACKAGE_ATOMIC,
)
REPLAYS = (BASELINE, PROMISES, PACKAGE)


def compare(operations: int, seed: int, progress: Callable[[str], None]) -> list[Table]:
    """Measure every variant ``operations`` times, in blocks in random order, so that noise affects all alike."""
    lots, rounds = random.Random(seed), max(1, operations // BLOCK)
    with views.tables():
        costs = Costs(FIRST_EXECUTIONS, REPLAYS)
        costs.count_round_trips()
        for number in range(rounds):
            progress(f"requests, round {number + 1} of {rounds}")
            costs.measure(lots)
    return [_table("First execution", costs.first), _table("Replay", costs.replayed)]


class Costs:
    """The costs of first executions and replays of some variants."""

    def __init__(self, first: Sequence[Variant], replayed: Sequence[Variant]) -> None:
        self.first = {variant: Cost() for variant in first}
        self.replayed = {variant: Cost() for variant in replayed}
        self._caller = Caller(account())
        self._keys = {variant: [Caller.new_key() for _ in range(BLOCK + 1)] for variant in replayed}
        for variant in first:  # warms up imports, and the caches of framework and server
            for _ in range(BLOCK):
                self._caller.calling(variant)()
        for variant, keys in self._keys.items():
            for key in keys * 2:  # the first execution, and a replay to warm up
                self._caller.calling(variant, key)()

    def count_round_trips(self) -> None:
        for variant, cost in self.first.items():
            cost.round_trips = round_trips(self._caller.calling(variant))
        for variant, cost in self.replayed.items():
            cost.round_trips = round_trips(self._caller.calling(variant, self._keys[variant][0]))

    def measure(self, lots: random.Random) -> None:
        """Measure a block of each variant."""
        for variant in lots.sample(list(self.first), len(self.first)):
            with effects(BLOCK + 1):
                measure_block(self.first[variant], [self._caller.calling(variant) for _ in range(BLOCK + 1)])
        for variant in lots.sample(list(self.replayed), len(self.replayed)):
            with effects(0):
                calls = [self._caller.calling(variant, key) for key in self._keys[variant]]
                measure_block(self.replayed[variant], calls)


def account() -> User:
    """The caller. Experiments share a database, so an earlier one may have created it."""
    return User.objects.get_or_create(username="benchmark")[0]


class Caller:
    """Calls views in this process, without a server, middleware or a token look-up."""

    def __init__(self, user: User) -> None:
        self.user = user
        self.factory = APIRequestFactory()

    @staticmethod
    def new_key() -> str:
        return str(uuid.uuid4())

    def calling(self, variant: Variant, key: str | None = None, status: int = 201) -> Callable[[], None]:
        """A function that calls the variant and checks the status. Creating the request is not timed."""
        view = variant.view.as_view()
        request = self.factory.post("/transfers/", BODY, format="json", HTTP_IDEMPOTENCY_KEY=key or self.new_key())
        force_authenticate(request, self.user)

        def call() -> None:
            response = view(request)
            if not getattr(response, "is_rendered", True):
                response.render()
            assert response.status_code == status, response

        return call


@contextmanager
def effects(expected: int) -> Iterator[None]:
    """Check the number of effects, because a fast variant must also be correct."""
    before = Transfer.objects.count()
    yield
    effects = Transfer.objects.count() - before
    assert effects == expected, f"{effects} effects instead of {expected}"


def _table(title: str, costs: dict[Variant, Cost]) -> Table:
    base = costs[BASELINE]
    base_wal = statistics.median(base.block_wal)
    table = Table(
        title,
        ("", "median", "p95", "wall", "CPU client", "CPU server", "CPU", "WAL", "WAL", "fsyncs", "round trips"),
        note="Columns with × are relative to the row `hand-written`. CPU × is for client and server together.",
    )
    for variant, cost in costs.items():
        wal = statistics.median(cost.block_wal)
        table.add(
            variant.name,
            milliseconds(statistics.median(cost.seconds)),
            milliseconds(p95(cost.seconds)),
            times(relative(cost.block_seconds, base.block_seconds)),
            microseconds(statistics.median(cost.client_cpu)),
            microseconds(statistics.median(cost.block_server_cpu) if cost.block_server_cpu else None),
            times(relative(cost.block_cpu, base.block_cpu)),
            bytes_of(wal),
            times(wal / base_wal if base_wal else None),
            f"{cost.fsyncs / len(cost.seconds):.2f}",
            count(cost.round_trips),
        )
    return table
