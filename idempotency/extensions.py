"""The additions of optional apps to the core, its admin and each other.

An app calls ``register`` in its ``AppConfig.ready()``, so the core imports no optional app. A protocol describes an
addition whose class is in a module above this one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:  # an app's operations.py must be importable without models
    from django.contrib.admin import ModelAdmin
    from django.db.models import Model, Q, QuerySet
    from django.http import HttpRequest


@dataclass(frozen=True)
class Purge:
    """A purge of rows other than records. It runs after the purge of records."""

    #: The name of its count in a result, and the name of one row.
    name: str
    row: str
    #: Returns the due rows of a database.
    due: Callable[[str], QuerySet[Any]]
    #: Purges them, with the arguments of ``operate.purge.purge_body_batches``.
    batches: Callable[..., Iterator[Any]]


class AccountsRows(Protocol):
    """An account's rows in a table, such as an ``operate.erasure.TableRows``."""

    @property
    def rows(self) -> QuerySet[Any]: ...
    @property
    def account_id(self) -> str: ...
    def chunks(self, size: int = ..., /) -> Iterator[list[int]]: ...
    def in_states(self, names: Collection[str], /) -> Q: ...
    def count(self) -> dict[str, int]: ...


class EventCounts(Protocol):
    """Counts of events, such as a ``contrib.dashboard.counting.Counters``."""

    def flush(self) -> None: ...
    def flush_if_due(self) -> None: ...
    def read(self, using: str, /) -> Mapping[str, Counter[str]]: ...


class Message(Protocol):
    """A message of the outbox."""

    @property
    def headers(self) -> Mapping[str, Any]: ...


@dataclass(frozen=True)
class Event:
    """An event in a record's timeline."""

    time: datetime
    text: str
    url: str = ""


@dataclass(frozen=True, kw_only=True)
class Extension:
    """The additions of one app."""

    purges: Sequence[Purge] = ()
    #: Called with an account and an alias, or None.
    find_messages: Callable[[str, str | None], AccountsRows] | None = None
    event_counts: EventCounts | None = None
    #: Called when a message is published. Returns its default headers, and must not raise.
    message_headers: Callable[[], Mapping[str, str]] | None = None
    #: Called with a message. Returns the context in which its sender runs.
    sending_context: Callable[[Message], AbstractContextManager[object]] | None = None
    #: Called with a record, the request, the admin of records and a list of notes, which it may add to.
    record_events: Callable[[Model, HttpRequest, ModelAdmin[Any], list[str]], Iterable[Event]] | None = None
    #: Imports modules with declarations of operations. See ``Registry.load``.
    import_operations: Callable[[], object] | None = None


#: By the name of the app, in the order of registration.
_extensions: dict[str, Extension] = {}


def register(app: str, additions: Extension) -> None:
    """Set the additions of an app."""
    _extensions[app] = additions


def extensions() -> Iterator[Extension]:
    return iter(list(_extensions.values()))
