"""``hold()``: a handler's lock lasts until the operation's transaction has ended."""

import threading
from contextlib import contextmanager, suppress
from contextvars import copy_context
from functools import partial

import pytest
from asgiref.sync import sync_to_async
from django.db import connection, transaction
from django.http import Http404, HttpResponse
from django.urls import path

from idempotency import hold, idempotent, require_claim
from idempotency.models import IdempotencyRecord
from testproject.models import Transfer
from tests.concurrency.failures import Killed, fail
from tests.concurrency.racing import elsewhere, race
from tests.concurrency.traces import effects, record
from tests.concurrency.urls import account_of, handler


class Lock:
    """Notes when it is taken and released, what is committed then, and the error that ended its block."""

    def __init__(self, name="lock", fails=None):
        self.name, self.fails = name, fails
        self.taken, self.released = 0, []

    def __enter__(self):
        self.taken += 1
        return self.name

    def __exit__(self, kind, error, traceback):
        self.released.append((threading.get_ident(), elsewhere(effects), connection.in_atomic_block, error))
        if self.fails is not None:
            raise self.fails
        return True  # an exit may suppress an error


def committed(lock):
    """What other connections saw at each release."""
    return [found for _, found, _, _ in lock.released]


@pytest.fixture
def lock():
    return Lock()


def write(label="held"):
    Transfer.objects.create(account_id=int(record().account_id), amount=1, label=label)


def held(lock, do=write):
    def handle(request):
        with hold(lock) as value:
            assert value == lock.name
            do()
        assert lock.released == []

    return handle


@pytest.mark.failure_109
def test_a_lock_is_released_after_the_commit_in_its_thread(post, lock):
    handler.after = held(lock)
    assert post().status_code == 201
    assert lock.released == [(threading.get_ident(), ["held", "one"], False, None)]
    assert post()["Idempotency-Replayed"] == "true"
    assert lock.taken == 1


@pytest.mark.failure_109
@pytest.mark.parametrize(
    ("end", "status"), [(fail, 500), (lambda: require_claim().discard(), 201)], ids=["error", "discard"]
)
def test_a_lock_is_released_after_a_rollback(post, lock, end, status):
    handler.after = held(lock, end)
    assert post().status_code == status
    assert committed(lock) == [[]]


def test_a_lock_gets_the_error_of_its_block_and_does_not_suppress_it(post, lock):
    error = Http404("on purpose")

    def refuse():
        raise error

    handler.after = held(lock, refuse)
    assert post().status_code == 404
    assert lock.released[0][3] is error
    assert (record().status, effects()) == ("completed", [])


def test_a_lost_lease_is_reported_although_a_lock_can_not_be_released(post, lock, caplog):
    lock.fails = RuntimeError("the lock has expired")
    handler.after = held(lock, lambda: IdempotencyRecord.objects.update(attempt=2) and None)
    # In the transaction, so the completing update matches no row.
    assert post().status_code == 409
    assert "could not be released" in caplog.text


def test_an_error_of_a_lock_changes_no_response_and_keeps_no_other_lock(post, lock, caplog):
    broken = Lock("broken", fails=RuntimeError("the lock has expired"))

    def take_both(request):
        with hold(lock), hold(broken):
            write()

    handler.after = take_both
    assert post().status_code == 201
    assert "A lock of Operation 'race.inside' could not be released" in caplog.text
    assert committed(lock) == committed(broken) == [["held", "one"]]


@pytest.mark.parametrize("is_inner", [True, False])
def test_a_base_exception_still_releases_the_other_lock(post, lock, is_inner):
    broken = Lock("broken", fails=Killed())

    def take_both(request):
        with hold(lock if is_inner else broken), hold(broken if is_inner else lock):
            write()

    handler.after = take_both
    with pytest.raises(Killed):
        post()
    assert len(lock.released) == 1


def test_an_exit_that_raises_its_own_error_again_is_not_reported(post, caplog):
    class Raising(Lock):
        def __exit__(self, kind, error, traceback):
            super().__exit__(kind, error, traceback)
            raise error

    lock = Raising()

    def divide(request):
        with suppress(ZeroDivisionError), hold(lock):
            1 / 0  # noqa: B018

    handler.after = divide
    assert post().status_code == 201
    assert (len(lock.released), "could not be released" in caplog.text) == (1, False)


@pytest.mark.parametrize("path", ["/again/", "/park/"])
def test_without_a_transaction_it_is_a_plain_with(post, lock, path):
    def handle(request):
        with hold(lock):
            write()
        assert len(lock.released) == 1

    handler.after = handle
    assert post(path).status_code == 201


@pytest.mark.failure_109
@pytest.mark.parametrize("is_first", [True, False])
def test_a_lock_around_or_after_begin_is_released_after_the_commit(post, lock, is_first):
    def handle(request):
        if not is_first:
            require_claim().begin()
        with hold(lock):
            if is_first:
                require_claim().begin()
            write()
        assert lock.released == []

    handler.before = handle
    assert post("/again/").status_code == 201
    assert committed(lock) == [["held", "one"]]


def test_without_a_claim_it_is_a_plain_with(account):
    lock = Lock()
    with hold(lock) as value:
        assert (value, lock.released) == ("lock", [])
    with hold(lock):
        fail()  # this lock suppresses errors
    assert [type(error) for *_, error in lock.released] == [type(None), RuntimeError]


def test_in_another_thread_it_is_a_plain_with(post, lock):
    def take():
        with hold(lock):
            pass
        assert len(lock.released) == 1

    handler.after = lambda request: elsewhere(partial(copy_context().run, take))
    assert post().status_code == 201


def test_after_the_attempt_it_is_a_plain_with(post, lock):
    contexts = []
    handler.after = lambda request: contexts.append(copy_context())
    assert post().status_code == 201

    def take():
        with hold(lock):
            pass

    contexts[0].run(take)  # as a background task of an async handler does
    assert len(lock.released) == 1


@contextmanager
def lock_by_a_transaction():
    with transaction.atomic():
        yield


@pytest.mark.parametrize(
    ("lock", "error", "remedy"),
    [
        (transaction.atomic, TypeError, "not atomic"),
        (lock_by_a_transaction, RuntimeError, "opens a transaction"),
        (threading.Lock, TypeError, "context manager"),
    ],
)
@pytest.mark.parametrize("path", ["/inside/", "/again/"])
def test_what_is_not_a_lock_is_refused_with_the_remedy(post, lock, error, remedy, path):
    made = lock if lock is threading.Lock else lock()

    def take(request):
        with pytest.raises(error, match=remedy), hold(made):
            raise AssertionError

    handler.before = take
    assert post(path).status_code == 201
    assert effects() == ["one"]


def test_an_async_handler_holds_a_lock_by_sync_to_async(account, post, settings, lock):
    refused = []

    def take():
        with hold(lock):
            Transfer.objects.create(account_id=int(account), amount=1, label="one")
        assert lock.released == []

    @idempotent("tests.hold.async", account=account_of)
    async def view(request):
        try:
            take()
        except RuntimeError as error:
            refused.append(str(error))
        await sync_to_async(take)()
        return HttpResponse(status=201)

    settings.ROOT_URLCONF = (path("async/", view),)
    assert post("/async/").status_code == 201
    assert committed(lock) == [["one"]]
    assert "sync_to_async" in refused[0]


@pytest.mark.failure_109
@pytest.mark.except_sqlite  # whose transactions run one after the other
@pytest.mark.parametrize("take", [hold, lambda lock: lock], ids=["hold", "with"])
def test_numbers_are_unique_only_if_the_lock_is_held(post, take, monkeypatch):
    lock = threading.Lock()
    both_have_one = threading.Barrier(2)
    if take is not hold:
        handler.after = lambda request: both_have_one.wait(60) and None

    def allocate(request):
        with take(lock):
            number = Transfer.objects.count() + 1
            write_number(request, number)

    def write_number(request, number):
        Transfer.objects.create(account_id=int(request.headers["X-Account"]), amount=1, label=f"number {number}")

    handler.before = allocate
    answers = race([partial(post, key=key, label="") for key in "ab"])
    assert [answer.status_code for answer in answers] == [201, 201]
    numbers = [label for label in effects() if label]
    assert (len(set(numbers)) == 2) is (take is hold)
