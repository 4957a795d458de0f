"""What optional apps add to the core, to its admin and to each other.

An app calls ``register`` in its ``AppConfig.ready()``. The core asks here, and imports no optional app.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Extension:
    """The additions of one app, each None or empty if it has none."""

    #: The ``operate.purge.OtherPurge`` of its tables.
    purges: Sequence[Any] = ()
    #: Called with the alias of a database in which a purge of records has found nothing more to delete.
    after_purge: Callable[[str], None] | None = None
    #: Called with an account and an alias, or None. Returns the ``operate.erasure.TableRows`` of its messages.
    find_messages: Callable[[str, str | None], Any] | None = None
    #: The ``contrib.dashboard.counting.Counters``.
    event_counts: Any = None
    #: Called when a message of the outbox is published. Returns headers for it, and must not raise. Those of the caller
    #: win over them.
    message_headers: Callable[[], Mapping[str, str]] | None = None
    #: Called with a message of the outbox. Returns the context in which its sender runs.
    sending_context: Callable[[Any], AbstractContextManager[object]] | None = None
    #: Called with a record, the request, the admin of records and a list of notes, which it may add to. Returns the
    #: ``admin.timeline.Event`` of its tables.
    record_events: Callable[[Any, Any, Any, list[str]], Iterator[Any]] | None = None
    #: Imports modules with declarations of operations. See ``Registry.load``.
    import_operations: Callable[[], object] | None = None


#: By the name of the app, in the order of registration.
_extensions: dict[str, Extension] = {}


def register(app: str, **additions: Any) -> None:
    """Add what an app adds. Called again for the same app, it replaces that.

    :param additions: the fields of ``Extension``.
    """
    _extensions[app] = Extension(**additions)


def extensions() -> Iterator[Extension]:
    return iter(list(_extensions.values()))
