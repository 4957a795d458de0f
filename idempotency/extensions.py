"""The additions of optional apps to the core, its admin and each other.

An app calls ``register`` in its ``AppConfig.ready()``, so the core imports no optional app.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Extension:
    """The additions of one app."""

    #: The ``operate.purge.OtherPurge`` of its tables.
    purges: Sequence[Any] = ()
    #: Called with an account and an alias, or None. Returns the ``operate.erasure.TableRows`` of its messages.
    find_messages: Callable[[str, str | None], Any] | None = None
    #: The ``contrib.dashboard.counting.Counters``.
    event_counts: Any = None
    #: Called when a message is published. Returns its default headers, and must not raise.
    message_headers: Callable[[], Mapping[str, str]] | None = None
    #: Called with a message. Returns the context in which its sender runs.
    sending_context: Callable[[Any], AbstractContextManager[object]] | None = None
    #: Called with a record, the request, the admin of records and a list of notes, which it may add to. Returns the
    #: ``admin.timeline.Event`` of its tables.
    record_events: Callable[[Any, Any, Any, list[str]], Iterator[Any]] | None = None
    #: Imports modules with declarations of operations. See ``Registry.load``.
    import_operations: Callable[[], object] | None = None


#: By the name of the app, in the order of registration.
_extensions: dict[str, Extension] = {}


def register(app: str, **additions: Any) -> None:
    """Set the additions of an app. They are the fields of ``Extension``."""
    _extensions[app] = Extension(**additions)


def extensions() -> Iterator[Extension]:
    return iter(list(_extensions.values()))
