"""Failures of handlers and stores, and the problem codes that report them."""

from contextlib import contextmanager

import pytest
from django.db import OperationalError, connection

from idempotency.store import store_for
from tests.concurrency.racing import elsewhere


class Killed(BaseException):
    """Simulates the end of the process: nothing handles it."""


def fail(request=None):
    raise RuntimeError("on purpose")


def unreachable(*args, **kwargs):
    raise OperationalError("server closed the connection unexpectedly")


def server_error(sqlstate):
    """PostgreSQL's error with this SQLSTATE, or an error without one if the connection was lost."""
    from psycopg import Error

    cause = Error("reported by the server")
    cause.sqlstate = sqlstate or None
    error = OperationalError("reported by the server")
    error.__cause__ = cause
    return error


def error_of(monkeypatch, sqlstate, *meanings):
    """PostgreSQL's error with this SQLSTATE. Elsewhere, an error for which these methods of the store return true."""
    if connection.vendor == "postgresql":
        return server_error(sqlstate)
    error = OperationalError("reported by the server")
    for meaning in meanings:
        monkeypatch.setattr(type(store_for("default")), meaning, lambda store, each: each is error)
    return error


def cut_connection(request=None):
    """End this thread's session from another one, as an idle timeout, a proxy or a fail-over does."""
    connection.ensure_connection()
    pid = connection.connection.info.backend_pid

    def end():
        with connection.cursor() as cursor:
            cursor.execute("SELECT pg_terminate_backend(%s, 5000)", [pid])

    elsewhere(end)


@contextmanager
def failing_database(owner, *names):
    """Inside the block, the database is unreachable for these functions."""
    with pytest.MonkeyPatch.context() as patched:
        for name in names:
            patched.setattr(owner, name, unreachable)
        yield


@contextmanager
def just_before(owner, name, happens):
    """In the block, call ``happens`` with the function's arguments before each call of the function."""
    function = getattr(owner, name)

    def late(*args, **kwargs):
        happens(*args, **kwargs)
        return function(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(owner, name, late)
        yield


def problem(answer):
    """Status and code of an answer that is a problem."""
    assert answer["Content-Type"] == "application/problem+json"
    return answer.status_code, str(answer.json()["code"])


BROKEN = (500, "idempotency_transaction_broken")
UNAVAILABLE = (503, "idempotency_unavailable")
IN_PROGRESS = (409, "idempotency_in_progress")
REUSED = (422, "idempotency_key_reused")
UNKNOWN = (409, "idempotency_outcome_unknown")
