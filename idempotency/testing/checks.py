"""``assert_idempotent`` and its checks. Each repeats a request in one way, and raises ``Broken`` or ``NotRun``."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Mapping
from typing import Any, Final

from django.db import connections
from django.db.models import Manager, QuerySet
from django.test import Client

from ..foreign import IS_IN_MEMORY, in_atomic_block
from ..identity import keys
from ..lifecycle import Recovery
from ..store import records_database
from .records import abandoned, expired
from .trial import PROTECT, Answer, Broken, NotRun, Report, Request, Trial, changed, refused

#: Problems that reveal a record.
ABOUT_A_RECORD = {"idempotency_key_reused", "idempotency_in_progress", "idempotency_outcome_unknown"}

#: Statuses for a duplicate without an outcome yet: accepted, running, throttled, unavailable.
COME_BACK = {202, 409, 429, 503}


def new_key(trial: Trial) -> None:
    """The same request under another key is another operation. All other checks rely on this."""
    request, before = trial.make_request(), trial.effects()
    answer = trial.send(request, keys.new_key())
    if answer.is_replay or (answer.succeeded and trial.effects() == before):
        raise Broken(
            f"the same request under a new key was answered {answer} and had no effect.",
            "Look for a response cache around the view, and for deduplication by payload. Only the key makes a request "
            "a retry.",
        )
    if not answer.succeeded:
        raise refused(answer)


def retry(trial: Trial) -> None:
    request, key, first, before = trial.first()
    answer = trial.send(request, key)
    trial.expect_once(before, "the retry took effect again", PROTECT)
    trial.expect_replay(first, answer, "the retry")


def concurrent(trial: Trial) -> None:
    """The same request from several threads at once."""
    connection = connections[records_database()]
    if in_atomic_block(connection):
        raise NotRun(
            "the test runs in a transaction that other threads can't see. Use TransactionTestCase, or "
            "@pytest.mark.django_db(transaction=True)."
        )
    is_in_memory = getattr(connection, IS_IN_MEMORY, None)
    if is_in_memory is not None and is_in_memory():
        raise NotRun(
            "threads can't share an SQLite database in memory. Set DATABASES['default']['TEST'] = "
            "{'NAME': 'test.sqlite3'}."
        )
    request, key, before = trial.make_request(), keys.new_key(), trial.effects()
    answers = trial.at_once(request, key)
    done = [answer for answer in answers if answer.succeeded and answer.status != 202]
    last = trial.send(request, key)
    trial.expect_once(
        before, f"{trial.threads} simultaneous requests under one key and a retry took effect other than once", PROTECT
    )
    for answer in (*answers, last):
        if not answer.succeeded and answer.status not in COME_BACK:
            raise Broken(
                f"a simultaneous request was answered {answer}.",
                "A duplicate must get the outcome, or a status to retry. Look for code before @idempotent.",
            )
    for answer in done:
        trial.expect_replay(last, answer, "a simultaneous request")


def other_payload(trial: Trial) -> None:
    """Another payload under the same key."""
    request, key, _first, before = trial.first()
    payload = changed(request.data) if trial.other_payload is None else trial.other_payload
    answer = trial.send(request.with_data(payload), key)
    trial.expect_once(before, "another payload under the same key took effect, too", PROTECT)
    if answer.succeeded or answer.failed:
        raise Broken(
            f"another payload under the same key was answered {answer}. It must be refused.",
            "The fingerprint omits the payload. The operation's payload= must return every field that matters. If the "
            "changed fields don't matter, pass other_payload=.",
        )


def other_account(trial: Trial) -> None:
    """The same request and key from another account."""
    if trial.other_client is None:
        raise NotRun("pass other_client=, a client of another account.")
    request, key, first, _before = trial.first()
    before = trial.effects()
    answer = trial.send(request, key, trial.other_client)
    is_leak = trial.effects() == before and answer == first
    if answer.is_replay or is_leak or answer.problem in ABOUT_A_RECORD:
        raise Broken(
            f"another account with the same key was answered {answer}: it can detect the first account's operation.",
            "Both requests belong to one account. Make account= identify the caller by the server's data, and look for "
            "a response cache around the view.",
        )
    if not answer.failed:
        return
    what = f"another account with the same key was answered {answer}"
    with_new_key = trial.send(trial.make_request(), keys.new_key(), trial.other_client)
    if with_new_key.failed:
        raise Broken(
            f"{what}, and with a new key {with_new_key}.",
            "The view fails for this account with any key. Look at the log. Pass an other_client= that may send the "
            "request, and a callable that makes the request if its payload must be unique.",
        )
    raise Broken(
        f"{what}, and with a new key {with_new_key}.",
        "The handler uses the client's key as if no other account could have it, for example in a unique column or at "
        "a provider. Use current_claim().derive_key(…), which differs between accounts.",
    )


def crash(trial: Trial) -> None:
    """The process dies after the handler has run, and before its outcome is committed."""
    request, key, before = trial.make_request(), keys.new_key(), trial.effects()
    answer = trial.send_and_crash(request, key, "complete.before" if trial.keeps_transaction else "render.after")
    if answer is not None:
        raise _not_recorded(answer)
    abandoned(key)
    answer = trial.send(request, key)
    count = trial.effects() - before
    recovery = Recovery.REEXECUTE if trial.operation is None else trial.operation.recovery
    what = f"the process died before the outcome was committed, and the retry was answered {answer}"
    if count > trial.once:
        raise Broken(f"{what}. There are {trial.times(before)}.", _advice_on_twice(trial, recovery))
    if answer.succeeded and count != trial.once:
        advice = (
            "A reconciler that returns Completed must first write the handler's rows that are missing, once, by a key "
            "that it derives from the record."
        )
        raise Broken(f"{what}, but there are {trial.times(before)}.", PROTECT if trial.keeps_transaction else advice)
    waits_for_decision = answer.problem in ABOUT_A_RECORD and recovery is not Recovery.REEXECUTE
    if not answer.succeeded and not waits_for_decision:
        raise Broken(
            f"{what}.",
            "The handler must be able to run again after its writes were rolled back. Look for state that outlives the "
            "transaction, such as a cache.",
        )


def _not_recorded(answer: Answer) -> Broken:
    return Broken(
        f"the request was answered {answer}, but no outcome was recorded. After a crash it would not be known "
        f"whether it had run.",
        PROTECT,
    )


def _advice_on_twice(trial: Trial, recovery: Recovery) -> str:
    if trial.keeps_transaction:
        return (
            "The effect is not in the record's transaction. Let the handler write to the database of the records, or "
            "declare transaction=False with the recovery= that fits, or pass current_claim().derive_key(…) to a "
            "service that deduplicates by it."
        )
    return (
        f"The operation declares recovery={recovery.name}. REEXECUTE needs a key from current_claim().derive_key(…) by "
        f"which the other side deduplicates, and current_claim().begin() before the first row that the handler writes. "
        f"A reconciler must find what has happened. PARK never runs again."
    )


def lost_response(trial: Trial) -> None:
    """The process dies after the outcome is committed, and before anything is sent or a callback is run."""
    request, key, before = trial.make_request(), keys.new_key(), trial.effects()
    answer = trial.send_and_crash(request, key, "complete.committed")
    retries = [trial.send(request, key) for _ in range(2)]
    if answer is None and retries[0].succeeded and trial.effects() - before < trial.once:
        raise Broken(
            f"the process died after the COMMIT, and a retry was answered {retries[0]}, but there are "
            f"{trial.times(before)}.",
            "The effect is in an on_commit() callback, which a crash skips for ever. Write it in the transaction, "
            "or publish() a message there.",
        )
    trial.expect_once(before, "the response was lost, and the request and its retries took effect", PROTECT)
    if answer is not None:
        raise _not_recorded(answer)
    trial.expect_replay(retries[0], retries[1], "a retry after the lost response")


def expiry(trial: Trial) -> None:
    """The same request after the retention is over."""
    request, key, _first, _before = trial.first()
    if trial.find_record(key) is None:
        raise NotRun("no record was written, so none can expire.")
    before = trial.effects()
    over = expired(key).expires_at
    answer = trial.send(request, key)
    if answer.is_replay or answer.failed or answer.problem:
        raise Broken(
            f"after its retention the key was answered {answer}. It must make a new request.",
            "Look for a response cache around the view.",
        )
    record = trial.find_record(key)
    ran_again = record is not None and record.expires_at > over
    if ran_again and not trial.keeps_transaction and trial.effects() == before:
        return  # the provider still knows the derived key
    if answer.succeeded:
        trial.expect_once(before, "after its retention the key did not make one new request", PROTECT)


def revoked(trial: Trial) -> None:
    """The same request after the caller has lost the permission."""
    if trial.revoke is None:
        raise NotRun("pass revoke=, a callable that takes the permission away from the client's account.")
    request, key, first, _before = trial.first()
    trial.revoke()
    answer = trial.send(request, key)
    if answer.is_replay or answer == first:
        raise Broken(
            f"the retry of a caller who has lost the permission was answered {answer}.",
            "Put @idempotent closest to the function, below every decorator that checks a login or a permission. What "
            "the handler itself checks is not checked before a replay.",
        )


#: The checks by name, in order: all rely on the first one, and the last one changes what the client may do.
CHECKS: Final[Mapping[str, Callable[[Trial], None]]] = {
    check.__name__: check
    for check in (new_key, retry, concurrent, other_payload, other_account, crash, lost_response, expiry, revoked)
}


class ChecksNotRunWarning(UserWarning):
    """``assert_idempotent`` found no broken promise, but could not run every check."""


def assert_idempotent(
    client: Client,
    request: Request | Callable[[], Request],
    *,
    effects: Callable[[], int] | QuerySet[Any] | Manager[Any],
    other_client: Client | None = None,
    other_payload: Any = None,
    revoke: Callable[[], object] | None = None,
    leave_out: Collection[str] = (),
    threads: int = 4,
) -> Report:
    """Repeat a request in every way that clients, networks and crashes do, and check that each operation takes effect
    once::

        assert_idempotent(
            self.client,
            Request("POST", "/transfers/", {"amount": 5}, content_type="application/json"),
            effects=Transfer.objects.all(),
            other_client=client_of_bob,
            revoke=lambda: alice.user_permissions.clear(),
        )

    The checks, each with new keys: ``new_key``, ``retry``, ``concurrent``, ``other_payload``, ``other_account``,
    ``crash``, ``lost_response``, ``expiry``, ``revoked``. A check that can't be run never passes: it is in the report
    with the reason, and in a ``ChecksNotRunWarning`` unless it is left out.

    :param client: Django's or Django REST framework's test client, of an account that may send the request. Only copies
        of it are used. It also serves async views.
    :param request: a request that succeeds, or a callable that makes one if the payload must be unique.
    :param effects: counts the effects of all accounts where they happen: a callable, or a queryset of rows.
    :param other_client: a client of another account, for ``other_account``.
    :param other_payload: for ``other_payload``; by default every value of the payload is changed.
    :param revoke: takes the client's permission away, for ``revoked``, the last check.
    :param leave_out: the names of checks to skip.
    :param threads: the number of requests that ``concurrent`` sends at once.
    :returns: the findings, if no promise broke.
    :raises AssertionError: a promise broke: the message lists each with its remedy. Or the request failed or had no
        effect, so that nothing could be checked.
    :raises TypeError: a client is not a ``django.test.Client``.
    :raises ValueError: ``leave_out`` contains an unknown name.
    """
    __tracebackhide__ = True  # pytest then shows the test's line and not this function
    for each in (client, other_client):
        if each is not None and not isinstance(each, Client):
            raise TypeError(
                f"assert_idempotent() needs Django's test client or Django REST framework's, not "
                f"{type(each).__module__}.{type(each).__qualname__}. They also serve async views and routes of Django "
                f"Ninja."
            )
    if unknown := set(leave_out) - CHECKS.keys():
        raise ValueError(f"There is no check {min(unknown)!r}. There are {', '.join(CHECKS)}.")
    make_request = request if callable(request) else lambda: request
    # all(), because an evaluated queryset counts its cached rows
    count = effects if callable(effects) else effects.all().count
    trial = Trial(client, make_request, count, other_client, other_payload, revoke, threads)
    report = Report(str(trial.begin()), left_out=[name for name in CHECKS if name in leave_out])
    unusable = _find(new_key, trial)
    for name, check in CHECKS.items():
        if name in leave_out:
            continue
        if check is new_key:
            finding = unusable
        elif unusable is not None:
            finding = NotRun(f"it needs new keys that take effect. {new_key.__name__}: {unusable}")
        else:
            finding = _find(check, trial)
        if isinstance(finding, Broken):
            report.broken[name] = finding
        elif isinstance(finding, NotRun):
            report.not_run[name] = str(finding)
        else:
            report.kept.append(name)
    if report.broken:
        raise AssertionError(str(report))
    if report.not_run:
        reasons = " ".join(f"{name}: {reason}" for name, reason in report.not_run.items())
        warnings.warn(
            f"{report.request}: not every check was run. {reasons} To accept that, name the check in leave_out=.",
            ChecksNotRunWarning,
            stacklevel=2,
        )
    return report


def _find(check: Callable[[Trial], None], trial: Trial) -> Broken | NotRun | None:
    try:
        check(trial)
    except (Broken, NotRun) as finding:
        return finding
    return None
