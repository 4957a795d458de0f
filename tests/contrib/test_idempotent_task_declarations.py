"""Declarations of idempotent tasks: refusals, and the system checks of Celery's options for them."""

import functools
import inspect
from datetime import timedelta

import pytest
from celery import Celery, Task
from celery.local import Proxy
from django.core.exceptions import ImproperlyConfigured

from idempotency import Operation
from idempotency.contrib.celery import idempotent_task
from idempotency.contrib.celery.checks import check_tasks
from idempotency.contrib.celery.deliveries import LONGEST_WAIT
from idempotency.contrib.celery.policy import TaskPolicy
from testproject.celery import app as sample
from tests.contrib.consumers import LATE, act, effect, send
from tests.operations import forget_operation
from tests.records import HOUR, MINUTE


@pytest.fixture
def app():
    """A separate Celery app, on Redis."""
    app = Celery("checked", broker="redis://127.0.0.1/0")
    yield app
    app.close()


def function(): ...


def declare(app, options=None, **policy):
    """Declare a task. Returns the ids of the system check messages about it."""
    forget_operation("tests.checked")
    app.tasks.pop("tests.checked", None)
    decorated = idempotent_task("tests.checked", **policy)(function)
    app.task(name="tests.checked", shared=False, **(LATE if options is None else LATE | options))(decorated)
    found = [message for message in check_tasks(None) if "tests.checked" in message.msg]
    assert all(message.hint for message in found)
    return [str(message.id) for message in found]


def test_the_sample_projects_tasks_and_the_defaults_pass(app):
    assert declare(app) == []
    assert [message for message in check_tasks(None) if "testproject" in message.msg] == []


@pytest.mark.failure_56
@pytest.mark.parametrize(
    ("broker", "transport", "longest"),
    [
        ("redis://127.0.0.1/0", {}, HOUR),
        ("rediss://127.0.0.1/0", {"visibility_timeout": 12 * 3600}, 12 * HOUR),
        ("amqp://127.0.0.1//", {"visibility_timeout": 12 * 3600}, 30 * MINUTE),
    ],
)
@pytest.mark.parametrize(
    ("options", "countdown"),
    [
        ({"default_retry_delay": 20}, timedelta(seconds=20)),
        ({"default_retry_delay": None}, timedelta(0)),
        ({"retry_kwargs": {"countdown": 900}, "autoretry_for": (KeyError,)}, 15 * MINUTE),
        ({"retry_backoff": True, "autoretry_for": (KeyError,)}, 10 * MINUTE),
        ({"retry_backoff": True, "retry_backoff_max": 1200, "autoretry_for": (KeyError,)}, 20 * MINUTE),
    ],
    ids=str,
)
def test_a_record_outlives_the_longest_redelivery(app, broker, transport, longest, options, countdown):
    app.conf.update(broker_url=broker, broker_transport_options=transport)
    last = longest + countdown + LONGEST_WAIT
    assert declare(app, options, retention=last) == ["idempotency.W004"]
    assert declare(app, options, retention=last + timedelta(seconds=1)) == []


@pytest.mark.parametrize(
    ("broker", "reason"), [("mongodb://127.0.0.1/", "pymongo"), ("nosuch://127.0.0.1/", "No such transport")]
)
def test_a_broker_whose_transport_cannot_be_imported_stops_no_check(app, broker, reason):
    app.conf.update(broker_url=broker)
    assert declare(app, retention=MINUTE) == []
    assert declare(app, {"acks_late": False}) == ["idempotency.W006"]
    (message,) = check_tasks(None)[1:]
    assert message.id == "idempotency.W028"
    assert reason in message.msg
    assert "pip install 'celery[redis]'" in message.hint


def test_a_consumer_whose_retention_exceeds_the_producers_is_reported(app, settings):
    settings.IDEMPOTENCY = {"RETENTION": 48 * HOUR}
    assert declare(app, retention=48 * HOUR + MINUTE) == ["idempotency.W007"]
    assert declare(app, retention=48 * HOUR) == []


@pytest.mark.failure_6
@pytest.mark.parametrize(
    ("options", "settings", "policy", "found"),
    [
        ({"time_limit": 60}, {}, {"lease": MINUTE}, []),
        ({"time_limit": 61}, {}, {"lease": MINUTE}, ["idempotency.W005"]),
        ({"time_limit": 61}, {}, {"lease": MINUTE, "heartbeat": MINUTE}, []),
        ({}, {"task_time_limit": 61}, {"lease": MINUTE}, ["idempotency.W005"]),
        ({"soft_time_limit": 61}, {}, {"lease": MINUTE}, ["idempotency.W005"]),
        ({"soft_time_limit": 30, "time_limit": 61}, {}, {"lease": MINUTE}, ["idempotency.W005"]),
        ({}, {"task_soft_time_limit": 61}, {"lease": MINUTE}, ["idempotency.W005"]),
    ],
    ids=str,
)
def test_a_lease_must_be_as_long_as_the_tasks_time_limit(app, options, settings, policy, found):
    app.conf.update(**settings)
    assert declare(app, options, **policy) == found


@pytest.mark.parametrize(
    ("options", "missing"),
    [
        ({"acks_late": False}, "acks_late=True and reject_on_worker_lost=True"),
        ({"reject_on_worker_lost": False}, "reject_on_worker_lost=True"),
    ],
    ids=str,
)
def test_a_message_that_would_be_lost_with_its_worker_is_reported(app, options, missing):
    assert declare(app, options) == ["idempotency.W006"]
    [message] = [message for message in check_tasks(None) if "tests.checked" in message.msg]
    assert message.hint == f"Declare the task with {missing}. An idempotent task may be delivered again."


@pytest.mark.parametrize(
    "broken", [None, {"RETENTION": 3}, {"LEASE": timedelta(0)}, {"RETENTION": MINUTE, "LEASE": HOUR}]
)
def test_an_invalid_setting_is_reported_once_and_stops_nothing(app, settings, broken):
    assert declare(app, {"acks_late": False}) != []
    settings.IDEMPOTENCY = broken
    assert check_tasks(None) == []


def test_the_policy_of_a_task_is_typed_keywords():
    parameter = inspect.signature(idempotent_task).parameters["policy"]
    assert parameter.kind is inspect.Parameter.VAR_KEYWORD
    assert parameter.annotation == "Unpack[TaskArguments]"


NAME = "tests.declared"


async def coroutine(): ...


async def generator():
    yield


def look():
    raise AssertionError("the app would be set up too early")


@pytest.mark.parametrize("function", [coroutine, generator])
def test_coroutine_functions_are_refused(function):
    with pytest.raises(ImproperlyConfigured, match="coroutine"):
        idempotent_task(NAME)(function)


@pytest.mark.parametrize(
    "decorated",
    [
        pytest.param(lambda: send, id="a task"),
        pytest.param(lambda: sample.task(name="tests.wrong", lazy=False, shared=False)(effect), id="an app's task"),
        pytest.param(lambda: Task, id="a class"),
        pytest.param(lambda: functools.partial(print), id="a partial"),
        pytest.param(lambda: print, id="a builtin"),
        pytest.param(lambda: Proxy(look), id="a lazy task"),
    ],
)
def test_the_wrong_order_of_decorators_is_refused(decorated):
    with pytest.raises(ImproperlyConfigured, match=r"@shared_task\(\.\.\.\)\n    @idempotent_task\('tests.declared'\)"):
        idempotent_task(NAME)(decorated())
    sample.tasks.pop("tests.wrong", None)


@pytest.mark.parametrize(
    "options",
    [
        *({"consumer": wrong} for wrong in ("", "two\nlines", 7)),
        *({"dead_letter": wrong} for wrong in ("", 7)),
        *({"max_attempts": wrong} for wrong in (0, True, 1.5)),
        {"transaction": False},
        {"lease": 5},
        {"max_key_age": timedelta(days=1)},
        {"max_response_body": 0},
        {"methods": ["PUT"]},
    ],
    ids=str,
)
def test_an_unsupported_option_is_refused_when_the_decorator_is_applied(options):
    [option] = options
    with pytest.raises(ImproperlyConfigured, match=f"'tests.declared'.*{option}"):
        idempotent_task(NAME, **options)


def test_the_decorator_takes_an_operation_declared_elsewhere():
    operation = Operation.declare(NAME)
    idempotent_task(operation)(lambda: None)
    with pytest.raises(ImproperlyConfigured, match="own policy"):
        idempotent_task(operation, transaction=True)


def test_a_function_with_only_variable_arguments_may_be_bound():
    def anything(*args): ...

    policy = TaskPolicy(Operation.declare(NAME), anything, None, None, 1)
    assert policy.arguments((act, 1), {}, bound=True) == policy.arguments((1,), {}, bound=False) == {"args": (1,)}


def test_celery_still_checks_the_arguments_of_a_call():
    with pytest.raises(TypeError):
        send.delay()
    with pytest.raises(TypeError):
        act.delay("a", "b", "c")
