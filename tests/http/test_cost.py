"""The cost that protection adds to a request: statements, transactions and messages on the wire.

``docs/explanation/costs.md`` explains these costs.
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
from tests.http.callers import effects, reopen_claim
from tests.http.serving import OUTSIDE, served
from tests.http.views import KINDS, plain_answer
from tests.records import HOUR
from tools.benchmarks.instruments import round_trips

pytestmark = pytest.mark.django_db(transaction=True)

TABLE = re.compile(r'(?:FROM|INTO|UPDATE)\s+["`]?((?:auth|authtoken|idempotency|testproject)_\w+)')

TRANSACTIONS = {"BEGIN", "COMMIT", "ROLLBACK", "SAVEPOINT", "RELEASE"}

#: SQLite reads first, because an insert would wait for its one writer. Only MySQL needs a BEGIN for one statement.
LOOK = ["SELECT idempotency_record"]
CLAIM = {
    "postgresql": ["INSERT idempotency_record"],
    "sqlite": [*LOOK, "INSERT idempotency_record"],
    "mysql": ["BEGIN", "INSERT idempotency_record", "COMMIT"],
}[connection.vendor]
#: A lost insert is an error of the portable statement, and a row count of zero for PostgreSQL's. MySQL's driver
#: doesn't report the text of a failed statement.
LOST_CLAIM = {"postgresql": [*CLAIM, *LOOK], "sqlite": LOOK, "mysql": ["BEGIN", "None", "ROLLBACK", *LOOK]}[
    connection.vendor
]
WORK = ["INSERT testproject_transfer"]
COMPLETE = ["UPDATE idempotency_record", "COMMIT"]
#: Completion outside the handler's transaction.
COMPLETE_ALONE = ["BEGIN", *COMPLETE] if connection.vendor == "mysql" else COMPLETE[:1]


def in_short(sql):
    """A statement as its verb and its table: ``UPDATE idempotency_record``."""
    sql = sql.removeprefix("SET STATEMENT innodb_lock_wait_timeout = 1 FOR ")  # MariaDB's claims
    sql = sql.rpartition("END $$; ")[2]  # drops the settings for Citus before the statement
    sql = sql.removeprefix("BEGIN; ")  # sent with the first statement; Django records a separate BEGIN
    verb = sql.split(maxsplit=1)[0].rstrip(";")
    table = TABLE.search(sql)
    return verb if verb in TRANSACTIONS or table is None else f"{verb} {table[1]}"


@contextmanager
def statements():
    """The block's statements, shortened. The list is filled when the block ends."""
    made = []
    with CaptureQueriesContext(connection) as captured:
        yield made
    made += [in_short(query["sql"]) for query in captured.captured_queries]


@pytest.fixture(params=["function", "async_function", "mixin_model_viewset"])
def protected(request, settings):
    """One kind of protected view at ``/``, and the same work unprotected at ``/bare/``."""
    view, _ = KINDS[request.param]
    settings.ROOT_URLCONF = (path("", view), path("bare/", served(plain_answer)))


def authentication(alice):
    """The statements of the bare view before its work: the caller's token and account are queried every time."""
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
def test_a_duplicate_costs_a_lost_insert_and_a_read(alice, claimed, amount, status):
    before = authentication(alice)
    alice.post(data={"amount": 1}, key="k")
    if claimed:
        reopen_claim()
    with untouched_record(), statements() as made:
        assert alice.post(data={"amount": amount}, key="k").status_code == status
    assert made == [*before, *LOST_CLAIM]


def test_a_request_refused_before_its_claim_costs_nothing(alice, serve, framework):
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
    ids=["not protected", "the view's transaction", "no transaction"],
)
def test_the_cost_without_a_key_within_atomic_and_outside(alice, serve, policy, view, key, expected):
    """A view's own transaction is a savepoint. Outside of one, the outcome is one statement."""
    serve(idempotent("tests.cost", **policy)(view), **{"bare/": plain_answer})
    before = authentication(alice)
    with statements() as made:
        assert alice.post(key=key).status_code == 201
    assert made == [*before, *expected]


@contextmanager
def untouched_record():
    """Check that the block changes neither the one record, nor its row version, nor the effects."""
    before = (_row(), IdempotencyRecord.objects.values().get(), effects())
    yield
    assert (_row(), IdempotencyRecord.objects.values().get(), effects()) == before


def _row():
    """The row's place, and the transactions that last wrote and locked it. On SQLite, the count of rows ever written.
    MySQL has neither."""
    if connection.vendor == "sqlite":
        return connection.connection.total_changes
    if connection.vendor == "mysql":
        return None
    return rows("SELECT ctid::text, xmin::text, xmax::text FROM idempotency_record")


# Round trips to PostgreSQL, counted by libpq, because Django also records a BEGIN and a COMMIT that are never sent


OUTSIDE_AGAIN = {"transaction": False, "recovery": REEXECUTE}

#: The view's work is one statement. In the package's transaction, BEGIN is sent with it, and COMMIT with the completing
#: update. A ROLLBACK is one more message, and so are the BEGIN and the COMMIT of the view's transaction.
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

    store_for("default")  # queries the server's kind once per process
    return sent(url, status) - sent("/none/", 204)


def renewing(request):
    require_claim().renew()
    return plain_answer(request)


def serve_with(serve, view=plain_answer, **policy):
    serve(idempotent("tests.messages", **policy)(view), **{"none/": lambda request: HttpResponse(status=204)})


@pytest.mark.postgres
@pytest.mark.except_citus  # where BEGIN, the statements, the settings and COMMIT are separate messages
@pytest.mark.parametrize(
    ("policy", "view", "status", "run"),
    [
        *[(policy, plain_answer, 201, RUN) for policy in ({}, {"recovery": PARK}, OUTSIDE_AGAIN, OUTSIDE)],
        # The handler's own atomic() sends its BEGIN and COMMIT separately.
        (OUTSIDE, transaction.atomic(plain_answer), 201, RUN_IN_TRANSACTION),
        ({**OUTSIDE, "lease": timedelta(seconds=30)}, renewing, 201, 1 + RUN),
        ({}, plain_answer, 503, RUN_UNDONE),  # a release, after the rollback
    ],
)
def test_a_first_execution_sends_one_message_to_claim_and_one_to_end(alice, serve, policy, view, status, run):
    serve_with(serve, view, **policy)
    assert messages(alice, status, f"/?status={status}") == 1 + run + 1


@pytest.mark.postgres
@pytest.mark.except_citus  # where BEGIN, the statements, the settings and COMMIT are separate messages
@pytest.mark.parametrize(
    ("lease", "status", "more"),
    [(None, 201, 0), (HOUR, 409, 0), (-HOUR, 201, 1 + RUN + 1)],
    ids=["a replay", "a conflict", "a take-over"],
)
def test_a_duplicate_sends_two_messages(alice, serve, lease, status, more):
    serve_with(serve)
    alice.post(key="k")
    if lease is not None:
        reopen_claim(lease=lease)
    assert messages(alice, status) == 2 + more
