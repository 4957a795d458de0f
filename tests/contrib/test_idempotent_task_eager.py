"""Tasks that run where they are published, as tests and small projects have it; and declarations that are refused."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
from celery import Task
from celery.local import Proxy
from django.core.exceptions import ImproperlyConfigured
from django.db import transaction

from idempotency import Operation, claim
from idempotency.contrib.celery import idempotent_task
from idempotency.contrib.celery.policy import TaskPolicy
from idempotency.exceptions import InProgressError, KeyInvalidError, KeyReusedError
from idempotency.models import IdempotencyRecord
from testproject.celery import app
from testproject.models import Receipt
from tests.contrib import consumers
from tests.contrib.consumers import FailureError, act, acting, acts, auto, effect, hold, send, succeed
from tests.records import HOUR, from_now


@pytest.fixture(autouse=True)
def _failures_are_raised(eager: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(app.conf, "task_eager_propagates", True)


def effects() -> list[str]:
    return list(Receipt.objects.order_by("pk").values_list("label", flat=True))


@pytest.mark.django_db(transaction=True)
def test_an_eager_task_has_one_effect_for_one_id() -> None:
    results = [send.apply_async(["a"], task_id="one").get() for _ in range(2)]
    assert results[0] == results[1] == {"receipt": Receipt.objects.get().pk, "pair": [1, 2]}
    assert IdempotencyRecord.objects.get().idempotency_key == "one"


@pytest.mark.django_db
def test_an_eager_task_works_inside_of_a_test_case() -> None:
    send.delay("a")
    assert IdempotencyRecord.objects.get().status == "completed"


@pytest.mark.django_db(transaction=True)
def test_an_eager_task_raises_where_a_message_would_wait_or_be_dead_lettered() -> None:
    hold(send, "held", label="a")
    with pytest.raises(InProgressError):
        send.apply_async(["a"], task_id="held")
    send.apply_async(["a"], task_id="used")
    with pytest.raises(KeyReusedError):
        send.apply_async(["b"], task_id="used")
    with pytest.raises(KeyInvalidError):
        send.apply_async(["a"], headers={"idempotency_key": "not a key"})
    assert effects() == ["a"]


@pytest.mark.django_db(transaction=True)
def test_an_eager_task_is_never_taken_for_poison() -> None:
    acts["a"] = succeed
    hold(act, "held", label="a")
    IdempotencyRecord.objects.update(attempt=2, lease_expires_at=from_now(-HOUR))
    assert act.apply_async(["a"], task_id="held").get() == "done"


@pytest.mark.django_db(transaction=True)
def test_an_eager_task_that_fails_is_not_dead_lettered_anywhere() -> None:
    acts["a"] = consumers.fail
    with pytest.raises(FailureError):
        act.delay("a")
    app.conf.task_eager_propagates = False  # and Celery announces the failure
    assert act.delay("a").state == "FAILURE"
    assert effects() == []


@pytest.mark.django_db(transaction=True)
def test_an_eager_task_is_retried_where_it_was_published() -> None:
    app.conf.task_eager_propagates = False
    acting("a", consumers.fail, succeed)
    assert auto.delay("a").get() == "done"
    acting("b", lambda task: task.retry(countdown=0), succeed)
    assert act.delay("b").get() == "done"
    assert effects() == ["a", "b"]


@pytest.mark.django_db(transaction=True)
def test_in_its_callers_transaction_an_eager_task_stands_or_falls_with_that() -> None:
    with claim("tests.outer", account_id="7", key="key") as run:
        send.delay("kept")
        run.result = None
    with transaction.atomic():
        send.delay("undone")
        transaction.set_rollback(True)
    assert effects() == ["kept"]
    assert IdempotencyRecord.objects.get().operation == "tests.outer"


# Declarations


NAME = "tests.declared"


async def coroutine() -> None: ...


async def generator() -> Any:
    yield


def look() -> None:
    raise AssertionError("the app would be set up before its time")


@pytest.mark.parametrize("function", [coroutine, generator])
def test_coroutine_functions_are_refused(function: Any) -> None:
    with pytest.raises(ImproperlyConfigured, match="coroutine"):
        idempotent_task(NAME)(function)


@pytest.mark.parametrize(
    "decorated",
    [
        pytest.param(lambda: send, id="a task"),
        pytest.param(lambda: app.task(name="tests.wrong", lazy=False, shared=False)(effect), id="a task of an app's"),
        pytest.param(lambda: Task, id="a class"),
        pytest.param(lambda: functools.partial(print), id="a partial"),
        pytest.param(lambda: print, id="a builtin"),
        pytest.param(lambda: Proxy(look), id="a task that nobody has looked at yet"),
    ],
)
def test_the_wrong_order_of_decorators_is_refused_with_the_right_one(decorated: Callable[[], Any]) -> None:
    with pytest.raises(ImproperlyConfigured, match=r"@shared_task\(\.\.\.\)\n    @idempotent_task\('tests.declared'\)"):
        idempotent_task(NAME)(decorated())
    app.tasks.pop("tests.wrong", None)


@pytest.mark.parametrize(
    "options",
    [
        {"consumer": ""},
        {"consumer": "two\nlines"},
        {"consumer": 7},
        {"dead_letter": ""},
        {"dead_letter": 7},
        {"max_attempts": 0},
        {"max_attempts": True},
        {"max_attempts": 1.5},
        {"transaction": False},
        {"lease": 5},
    ],
    ids=str,
)
def test_what_it_cannot_work_with_is_refused_when_it_is_applied(options: dict[str, Any]) -> None:
    [option] = options
    with pytest.raises(ImproperlyConfigured, match=f"'tests.declared'.*{option}"):
        idempotent_task(NAME, **options)


def test_it_takes_an_operation_that_is_declared_elsewhere() -> None:
    operation = Operation(NAME)
    idempotent_task(operation)(lambda: None)
    with pytest.raises(ImproperlyConfigured, match="own policy"):
        idempotent_task(operation, transaction=True)


def test_a_function_of_nothing_but_any_arguments_gets_its_task_too() -> None:
    def anything(*args: Any) -> None: ...

    policy = TaskPolicy(Operation(NAME), anything, None, None, 1)
    assert policy.arguments((act, 1), {}, bound=True) == policy.arguments((1,), {}, bound=False) == {"args": (1,)}


def test_celery_still_checks_the_arguments_of_a_call() -> None:
    with pytest.raises(TypeError):
        send.delay()
    with pytest.raises(TypeError):
        act.delay("a", "b", "c")
