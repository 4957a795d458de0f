"""What protection adds to a request: statements, transactions, messages on the wire, and waits for the disk.

``docs/explanation/costs.md`` says what that costs.
"""

import re
from contextlib import contextmanager
from datetime import timedelta

import pytest
from django.db import connection, transaction
from django.http import HttpResponse
from django.test.utils import CaptureQueriesContext
from django.urls import path

from idempotency import PARK, REEXECUTE, idempotent, require_claim
from idempotency.models import IdempotencyRecord
from idempotency.store import store_for
from tests.concurrency.traces import rows
from tests.http.callers import claim_anew, effects
from tests.http.serving import OUTSIDE, served
from tests.http.views import KINDS, plain_answer
from tests.records import HOUR
from tools.benchmarks.instruments import round_trips

pytestmark = pytest.mark.django_db(transaction=True)

TABLE = re.compile(r'(?:FROM|INTO|UPDATE)\s+["`]?((?:auth|authtoken|idempotency|testproject)_\w+)')

TRANSACTIONS = {"BEGIN", "COMMIT", "ROLLBACK", "SAVEPOINT", "RELEASE"}

#: SQLite looks first, because an insert would wait for its one writer. Others than MySQL need no BEGIN for a statement.
LOOK = ["SELECT idempotency_record"]
CLAIM = {
    "postgresql": ["INSERT idempotency_record"],
    "sqlite": [*LOOK, "INSERT idempotency_record"],
    "mysql": ["BEGIN", "INSERT idempotency_record", "COMMIT"],
}[connection.vendor]
#: The insert that loses is an error for the portable statement, and a count of zero for PostgreSQL's. MySQL's driver
#: doesn't remember a statement that failed.
LOST_CLAIM = {"postgresql": [*CLAIM, *LOOK], "sqlite": LOOK, "mysql": ["BEGIN", "None", "ROLLBACK", *LOOK]}[
    connection.vendor
]
WORK = ["INSERT testproject_transfer"]
COMPLETE = ["UPDATE idempotency_record", "COMMIT"]
#: Outside of the handler's transaction.
COMPLETE_ALONE = ["BEGIN", *COMPLETE] if connection.vendor == "mysql" else COMPLETE[:1]


def in_short(sql):
    """A statement as its verb and its table: ``UPDATE idempotency_record``."""
    sql = sql.removeprefix("SET STATEMENT innodb_lock_wait_timeout = 1 FOR ")  # MariaDB's claims
    sql = sql.rpartition("END $$; ")[2]  # before it are the settings for Citus
    sql = sql.removeprefix("BEGIN; ")  # what travels with a first statement; Django records a BEGIN of its own
    verb = sql.split(maxsplit=1)[0].rstrip(";")
    table = TABLE.search(sql)
    return verb if verb in TRANSACTIONS or table is None else f"{verb} {table[1]}"


@contextmanager
def statements():
    """What reaches the database in the block, in short; empty until the block has ended."""
    made = []
    with CaptureQueriesContext(connection) as captured:
        yield made
    made += [in_short(query["sql"]) for query in captured.captured_queries]


@pytest.fixture(params=["function", "async_function", "method", "api_view", "mixin_model_viewset", "both"])
def protected(request, settings):
    """One kind of protected view at ``/``, and the same work unprotected at ``/bare/``."""
    view, _ = KINDS[request.param]
    settings.ROOT_URLCONF = (path("", view), path("bare/", served(plain_answer)))


def authentication(alice):
    """What the bare view costs before its work: the caller's token and account are looked up every time."""
    with statements() as made:
        assert alice.post("/bare/").status_code == 201
    assert made[-1:] == WORK
    return made[:-1]


def test_a_first_execution_adds_one_claim_and_one_update(alice, protected):
    before = authentication(alice)
    with statements() as made:
        assert alice.post(key="k").status_code == 201
    assert made == [*before, *CLAIM, "BEGIN", *WORK, *COMPLETE]


@pytest.mark.parametrize(
    ("claimed", "amount", "status"),
    [(False, 1, 201), (True, 1, 409), (False, 2, 422)],
    ids=["a replay", "a conflict", "a reused key"],
)
@pytest.mark.usefixtures("protected")
def test_a_duplicate_is_a_lost_insert_and_a_read(alice, claimed, amount, status):
    before = authentication(alice)
    alice.post(data={"amount": 1}, key="k")
    if claimed:
        claim_anew()
    with untouched_record(), statements() as made:
        assert alice.post(data={"amount": amount}, key="k").status_code == status
    assert made == [*before, *LOST_CLAIM]


def test_a_request_that_is_refused_before_its_claim_is_free(alice, serve, framework):
    serve(framework.view(protect=idempotent("tests.cost")), **{"bare/": plain_answer})
    before = authentication(alice)
    with statements() as made:
        assert [alice.post(key=key).status_code for key in ("not,one", None)] == [400, 400]
    assert made == before * 2


@pytest.mark.parametrize(
    ("policy", "view", "key", "expected"),
    [
        ({"key_required": False}, plain_answer, None, WORK),
        ({}, transaction.atomic(plain_answer), "k", [*CLAIM, "BEGIN", "SAVEPOINT", *WORK, "RELEASE", *COMPLETE]),
        (OUTSIDE, plain_answer, "k", [*CLAIM, *WORK, *COMPLETE_ALONE]),
    ],
    ids=["not protected", "a transaction of the view's own", "no transaction"],
)
def test_what_else_a_request_costs(alice, serve, policy, view, key, expected):
    """A view's own transaction is a savepoint. Outside of one, the outcome is one statement."""
    serve(idempotent("tests.cost", **policy)(view), **{"bare/": plain_answer})
    before = authentication(alice)
    with statements() as made:
        assert alice.post(key=key).status_code == 201
    assert made == [*before, *expected]


@contextmanager
def untouched_record():
    """Neither the one record nor its row, nor any effect, changes in the block."""
    before = (_row(), IdempotencyRecord.objects.values().get(), effects())
    yield
    assert (_row(), IdempotencyRecord.objects.values().get(), effects()) == before


def _row():
    """Where the record's row is and who last wrote or locked it; on SQLite, how many rows were ever written. MySQL
    doesn't say."""
    if connection.vendor == "sqlite":
        return connection.connection.total_changes
    if connection.vendor == "mysql":
        return None
    return rows("SELECT ctid::text, xmin::text, xmax::text FROM idempotency_record")


# Messages that PostgreSQL is waited for, read off the wire by libpq: Django records a BEGIN and a COMMIT never sent


OUTSIDE_AGAIN = {"transaction": False, "recovery": REEXECUTE}

#: The work of the view is one statement. In the package's transaction it brings BEGIN along, and the completing update
#: brings COMMIT. A ROLLBACK is one message more, and so are BEGIN and COMMIT of a transaction of the view's own.
RUN = 1
RUN_UNDONE = 2
RUN_IN_TRANSACTION = 3


def messages(alice, status, url="/"):
    def sent(url, status):
        statuses = []
        count = round_trips(lambda: statuses.append(alice.post(url, key="k").status_code))
        assert statuses == [status]
        assert count is not None, "libpq can only show its messages on Linux"
        return count

    store_for("default")  # asks once in a process which store is the server's
    return sent(url, status) - sent("/none/", 204)


def renewing(request):
    require_claim().renew()
    return plain_answer(request)


def serve_with(serve, view=plain_answer, **policy):
    serve(idempotent("tests.messages", **policy)(view), **{"none/": lambda request: HttpResponse(status=204)})


@pytest.mark.postgres
@pytest.mark.parametrize(
    ("policy", "view", "status", "run"),
    [
        *[(policy, plain_answer, 201, RUN) for policy in ({}, {"recovery": PARK}, OUTSIDE_AGAIN, OUTSIDE)],
        # The connection is as it was: blocks of the handler's own begin and end.
        (OUTSIDE, transaction.atomic(plain_answer), 201, RUN_IN_TRANSACTION),
        ({**OUTSIDE, "lease": timedelta(seconds=30)}, renewing, 201, 1 + RUN),
        ({}, plain_answer, 503, RUN_UNDONE),  # a release, after the rollback
    ],
)
def test_a_first_execution_sends_one_message_to_claim_and_one_to_end(alice, serve, policy, view, status, run):
    serve_with(serve, view, **policy)
    assert messages(alice, status, f"/?status={status}") == 1 + run + 1


@pytest.mark.postgres
@pytest.mark.parametrize(
    ("lease", "status", "more"),
    [(None, 201, 0), (HOUR, 409, 0), (-HOUR, 201, 1 + RUN + 1)],
    ids=["a replay", "a conflict", "a take-over"],
)
def test_a_duplicate_sends_two_messages(alice, serve, lease, status, more):
    serve_with(serve)
    alice.post(key="k")
    if lease is not None:
        claim_anew(lease=lease)
    assert messages(alice, status) == 2 + more
