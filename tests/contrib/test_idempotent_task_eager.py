"""Eager tasks, as in tests and small projects, and the statements of a protected task."""

from uuid import uuid4

import pytest
from django.db import transaction

from idempotency import claim
from idempotency.exceptions import BodyGoneError, InProgressError, KeyInvalidError, KeyReusedError
from idempotency.models import IdempotencyRecord
from testproject.models import Receipt, UnprotectedReceipt
from testproject.tasks import send_receipt, send_receipt_unprotected
from tests.contrib.consumers import act, auto, hold, send
from tests.contrib.deliveries import FailureError, acting, acts, fail, succeed
from tests.http.test_cost import CLAIM, COMPLETE, LOST_CLAIM, statements
from tests.records import HOUR, from_now, purge_body_of

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture(autouse=True)
def _failures_are_raised(eager, settings):
    settings.CELERY_TASK_EAGER_PROPAGATES = True


def effects():
    return list(Receipt.objects.order_by("pk").values_list("label", flat=True))


@pytest.mark.django_db
def test_an_eager_task_works_inside_a_test_case():
    send.delay("a")
    assert IdempotencyRecord.objects.get().status == "completed"


def test_an_eager_task_raises_instead_of_waiting_or_dead_lettering():
    hold(send, "held", label="a")
    with pytest.raises(InProgressError):
        send.apply_async(["a"], task_id="held")
    send.apply_async(["a"], task_id="used")
    with pytest.raises(KeyReusedError):
        send.apply_async(["b"], task_id="used")
    with pytest.raises(KeyInvalidError):
        send.apply_async(["a"], headers={"idempotency_key": "not a key"})
    purge_body_of("used")
    with pytest.raises(BodyGoneError):
        send.apply_async(["a"], task_id="used")
    assert effects() == ["a"]


def test_an_eager_task_is_never_treated_as_poison():
    acts["a"] = succeed
    hold(act, "held", label="a")
    IdempotencyRecord.objects.update(attempt=2, lease_expires_at=from_now(-HOUR))
    assert act.apply_async(["a"], task_id="held").get() == "done"


def test_an_eager_task_that_fails_is_not_dead_lettered(settings):
    acts["a"] = fail
    with pytest.raises(FailureError):
        act.delay("a")
    settings.CELERY_TASK_EAGER_PROPAGATES = False  # then Celery sends its failure signal
    assert act.delay("a").state == "FAILURE"
    assert effects() == []


def test_an_eager_task_is_retried_where_it_was_published(settings):
    settings.CELERY_TASK_EAGER_PROPAGATES = False
    acting("a", fail, succeed)
    assert auto.delay("a").get() == "done"
    acting("b", lambda task: task.retry(countdown=0), succeed)
    assert act.delay("b").get() == "done"
    assert effects() == ["a", "b"]


def test_an_eager_task_commits_or_rolls_back_with_its_caller():
    with claim("tests.outer", account_id="7", key="key") as run:
        send.delay("kept")
        run.result = None
    with transaction.atomic():
        send.delay("undone")
        transaction.set_rollback(True)
    assert effects() == ["kept"]
    assert IdempotencyRecord.objects.get().operation == "tests.outer"


def test_a_protected_task_adds_two_statements_and_a_duplicate_adds_one():
    task_id = str(uuid4())
    with statements() as bare:
        send_receipt_unprotected.apply(kwargs={"label": "bare", "amount": 1}, task_id=task_id).get()
    with statements() as made:
        send_receipt.apply(kwargs={"label": "kept", "amount": 1}, task_id=task_id).get()
    with statements() as again:
        send_receipt.apply(kwargs={"label": "kept", "amount": 1}, task_id=task_id).get()
    assert bare == ["INSERT testproject_unprotectedreceipt"]
    assert made == [*CLAIM, "BEGIN", "INSERT testproject_receipt", *COMPLETE]
    assert again == LOST_CLAIM
    assert (Receipt.objects.count(), UnprotectedReceipt.objects.count()) == (1, 1)
