"""``assert_idempotent``: runs the checks and reports what they found."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection
from difflib import get_close_matches
from typing import Any

from django.db.models import Manager, QuerySet
from django.test import Client

from .checks import CHECKS, new_key
from .trial import Broken, NotRun, Report, Request, Trial


class ChecksNotRunWarning(UserWarning):
    """``assert_idempotent`` found nothing wrong, but could not run every check."""


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
    """Repeat a request in every way in which a client, a network or a crash repeats it, and see that each operation
    takes effect once::

        assert_idempotent(
            self.client,
            Request("POST", "/transfers/", {"amount": 5}, content_type="application/json"),
            effects=Transfer.objects.all(),
            other_client=client_of_bob,
            revoke=lambda: alice.user_permissions.clear(),
        )

    The checks, each with new keys: ``new_key``, ``retry``, ``concurrent``, ``other_payload``, ``other_account``,
    ``crash``, ``lost_response``, ``expiry``, ``revoked``. A check that can't be run is never counted as passed: it is
    in the report with the reason, and in a ``ChecksNotRunWarning`` unless it is left out.

    :param client: Django's test client, or Django REST framework's, of an account that may send the request. It also
        serves async views. It stays as it is, because copies of it are used.
    :param request: a request that succeeds; or a callable that makes one, if the payload must be unique.
    :param effects: counts the effects of all accounts where they happen: a callable, or a queryset whose rows are
        counted.
    :param other_client: a client of another account, for ``other_account``.
    :param other_payload: another payload for the same request, for ``other_payload``. By default every value of the
        payload is changed.
    :param revoke: takes away what the client may do, for ``revoked``, which is the last check.
    :param leave_out: the names of checks that are not run.
    :param threads: how many requests ``concurrent`` sends at once.
    :returns: what was found, if no promise broke.
    :raises AssertionError: a promise broke. The message says which ones, and how to correct each. Or the request failed
        or had no effect, so that nothing could be checked.
    :raises TypeError: a client is no ``django.test.Client``.
    :raises ValueError: there is no check of a name in ``leave_out``.
    """
    __tracebackhide__ = True  # pytest then shows the test's line and not this function
    _refuse_other_clients(client, other_client)
    _refuse_unknown(leave_out)
    make_request = request if callable(request) else lambda: request
    # all(), because a queryset that was read counts what it has read
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


def _refuse_other_clients(*clients: Any) -> None:
    for client in clients:
        if client is not None and not isinstance(client, Client):
            raise TypeError(
                f"assert_idempotent() needs Django's test client or Django REST framework's, not "
                f"{type(client).__module__}.{type(client).__qualname__}. They also serve async views and routes of "
                f"Django Ninja."
            )


def _refuse_unknown(names: Collection[str]) -> None:
    for name in names:
        if name not in CHECKS:
            near = get_close_matches(name, CHECKS, n=1)
            advice = f"Did you mean {near[0]!r}?" if near else f"There are {', '.join(CHECKS)}."
            raise ValueError(f"There is no check {name!r}. {advice}")
