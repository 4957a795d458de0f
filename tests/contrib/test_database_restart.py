"""PostgreSQL restarts while a consumer processes a message: the message is redelivered and takes effect once."""

import pytest
from celery.exceptions import Ignore
from django.db import InterfaceError, OperationalError, connections
from environ import Env

from idempotency import claim
from idempotency.contrib.dashboard.counting import counters
from idempotency.exceptions import UnavailableError
from idempotency.models import IdempotencyRecord
from idempotency.protocol import faults
from testproject.models import Receipt
from tests.contrib.consumers import act, effect, effects, end_leases, outside, record
from tests.contrib.deliveries import DEAD, Delivered, acting, succeed
from tests.crash.storms import server_to_stop

pytestmark = [pytest.mark.postgres, pytest.mark.django_db(transaction=True)]


@pytest.fixture(scope="module")
def stoppable():
    with server_to_stop() as server:
        yield server


@pytest.fixture
def server(stoppable, transactional_db):
    """Connect this thread to a server that may be stopped."""
    mine = connections["default"]
    other = mine.copy()
    other.settings_dict |= Env.db_url_config(stoppable.url)
    connections["default"] = other
    try:
        yield stoppable
    finally:
        other.close()  # it may be broken
        IdempotencyRecord.objects.all().delete()
        Receipt.objects.all().delete()
        other.close()
        connections["default"] = mine
        counters.reset()


def once(happens):
    left = [happens]
    return lambda: left.pop()() if left else None


def restarting(server, task=None):
    server.restart()
    return Receipt.objects.count()


@pytest.mark.failure_100
@pytest.mark.scenario_25
@pytest.mark.parametrize("task", [act, outside], ids=["in a transaction", "outside"])
@pytest.mark.parametrize("place", ["claim.before", "the task", "complete.before", "complete.committed"])
def test_a_restart_of_the_database_makes_no_dead_letter(inbox, server, task, place):
    acting("a", succeed)
    if place == "the task":
        acting("a", lambda task: restarting(server), succeed)
    else:
        faults.fault_point[place] = once(server.restart)
    inbox.publish(task, "a")
    delivered = inbox.deliver()
    for _ in range(3):
        if not inbox.messages():
            break
        assert (delivered.answer, type(delivered.result)) == ("acknowledged", Ignore)
        end_leases()
        delivered = inbox.deliver()
    assert delivered == Delivered("acknowledged", "done")
    connections["default"].close()  # like Celery after each task
    assert (record().status, inbox.messages(DEAD)) == ("completed", [])
    if task is act:
        assert effects() == {"a": 1}


@pytest.mark.scenario_25
def test_a_custom_consumer_gets_a_retryable_error(server):
    """It keeps its process and its connection, and only the package reconnects."""

    def consume(happens):
        with claim("tests.consumer", account_id="1", key="k") as run:
            if not run.replayed:
                effect("a")
                happens()
                run.result = effect("a")
        return run.result

    with pytest.raises((OperationalError, InterfaceError)):
        consume(lambda: restarting(server))
    server.restart()  # and once more while the consumer is idle
    with pytest.raises(UnavailableError):
        consume(bool)
    assert consume(bool) == consume(bool)
    assert effects() == {"a": 2}
