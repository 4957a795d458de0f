"""The promises hold after each order of two actors' steps, and after random orders of three.

By default an actor is made to wait at most once or twice. ``--count 0`` plays every order of a pair, and
``--count 100000`` plays that many random walks. A pair whose orders all end alike fails, because nothing was exercised.
"""

import logging
import random
from contextlib import closing, suppress
from itertools import groupby

import pytest
from django.db import connection

from tests.crash.mutations import MUTATIONS
from tests.orders.scheduler import Scheduler, every_order, walk
from tests.orders.stage import (
    PAIRS,
    PLAYED,
    WALKERS,
    Schedule,
    abandoned,
    abandoned_long_ago,
    lease_ends,
    nothing,
    request,
    retention_ends,
)
from tests.results import recording

# The scheduler recognises an actor that waits for a lock on PostgreSQL and on SQLite.
pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.except_mariadb]

LEVELS = ["READ_COMMITTED", "REPEATABLE_READ"] if connection.vendor == "postgresql" else [""]
#: At most how often an actor is made to wait for another one that doesn't hold its lock: in the reduced run, and in the
#: search for a planted bug.
REDUCED, THOROUGH = 1, 2
#: Pairs whose overtaken attempt must continue before the other one has ended, which takes two such waits.
CRITICAL = {"a take-over", "a sweep", "an operator's release"}
WALKS = 60


@pytest.fixture(autouse=True)
def _silence():
    """Each lost lease logs a warning, and these tests lose thousands."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


class Played:
    """The results of all schedules of a test."""

    def __init__(self):
        self.failures = []
        self.endings = set()
        self.count = 0

    def add(self, schedule):
        self.count += 1
        if schedule.problems:
            self.failures.append(schedule)
        states = [seen and (seen.status, seen.attempt) for seen in schedule.history]
        self.endings.add(
            (*(state for state, _ in groupby(states)), *(answer.status_code for answer in schedule.answers))
        )

    def judge(self, what, *, blocked=None, **figures):
        figures |= {"orders": self.count, "endings": len(self.endings), "violations": len(self.failures)}
        with recording(what, blocked=blocked, **figures):
            assert self.count > 0
            assert not self.failures, "\n".join(map(str, self.failures[:5]))
            assert len(self.endings) > 1, "all orders ended alike"


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(("pair", "declaration", "before"), PLAYED)
def test_no_order_of_two_breaks_a_promise(level, pair, declaration, before, count, seed):
    played = Played()

    def play(choose):
        played.add(Schedule(declaration, PAIRS[pair], seed).play(scheduler, choose, before))

    with closing(Scheduler(2, level)) as scheduler:
        switches = None if count == 0 else THOROUGH if pair in CRITICAL else REDUCED
        every_order(play, switches)
    if pair == "two relays":
        played.endings |= {"a relay judges its messages", "and no record"}
    played.judge(
        f"orders: {pair}",
        declaration=declaration,
        before=before.__name__,
        switches="any" if switches is None else switches,
        database=connection.vendor,
        level=level,
        seed=seed,
    )


@pytest.mark.parametrize("level", LEVELS)
def test_no_walk_of_three_breaks_a_promise(level, count, seed):
    played = Played()
    with closing(Scheduler(3, level)) as scheduler:
        for number in range(seed, seed + (count or WALKS)):
            chance = random.Random(number)
            declaration = chance.choice(["inside", "again"])
            acts = [request, *chance.choices(WALKERS, k=2)]
            schedule = Schedule(declaration, acts, number).play(scheduler, walk(number))
            schedule.order += f", walk {number}"
            played.add(schedule)
    played.judge("walks", blocked=scheduler.blocked, seed=seed, database=connection.vendor, level=level)


# Broken variants, which the judge must detect.


#: Draws by which the first attempt answers 201, and 402.
CREATED, REFUSED = -1, 0


class FoundError(Exception):
    """One broken promise is enough."""


def find(pair, declaration, before=nothing, draw=CREATED):
    """The judge's report on the first order that breaks a promise."""
    found = []

    def play(choose):
        schedule = Schedule(declaration, pair, draw).play(scheduler, choose, before)
        if schedule.problems:
            found.append(schedule)
            raise FoundError

    with closing(Scheduler(2)) as scheduler, suppress(FoundError):
        every_order(play, THOROUGH)
    return str(found[0]) if found else "it survived"


@pytest.mark.parametrize(
    ("bug", "pair", "declaration", "before", "promise"),
    [
        pytest.param("without_attempt", "a take-over", "inside", nothing, "P6", marks=pytest.mark.postgres),
        ("completion_after_the_commit", "a take-over", "inside", nothing, "P1"),
        ("refusal_unfenced", "a take-over", "inside", nothing, "P6"),
        pytest.param("take_over_of_live_claims", "two requests", "ask", nothing, "P1", marks=pytest.mark.postgres),
        ("park_runs_again", "a take-over", "park", nothing, "P1"),
        ("not_executed_is_assumed", "a reconciler", "ask", abandoned, "P1: 2 effects"),
        ("retention_ends_the_unknown", "a reconciler", "ask", abandoned_long_ago, "P1: 2 effects"),
    ],
)
def test_a_broken_variant_is_detected(bug, pair, declaration, before, promise):
    assert (pair, declaration, before) in PLAYED
    with pytest.MonkeyPatch.context() as patch:
        MUTATIONS[bug](patch)
        assert promise in find(PAIRS[pair], declaration, before, REFUSED if bug == "refusal_unfenced" else CREATED)


@pytest.mark.parametrize(
    ("statement", "problem"),
    [
        # A purge before the end of the retention.
        ("DELETE FROM idempotency_record WHERE status = 'completed'", "P6"),
        ("BEGIN", "a transaction was left open"),
    ],
)
def test_a_harmful_statement_of_another_actor_is_detected(statement, problem):
    def execute(_):
        connection.cursor().execute(statement)

    assert problem in find((request, execute), "inside")


def test_an_actor_that_waits_for_a_lock_is_recognised():
    def play(choose):
        Schedule("inside", PAIRS["an operator's release"]).play(scheduler, choose)

    with closing(Scheduler(2)) as scheduler:
        every_order(play, THOROUGH)
    assert scheduler.blocked > 0


def test_an_order_is_reproduced_by_its_seed():
    with closing(Scheduler(3)) as scheduler:
        orders = [
            Schedule("inside", [request, lease_ends, retention_ends]).play(scheduler, walk(7)).order for _ in range(2)
        ]
    assert orders[0] == orders[1]
