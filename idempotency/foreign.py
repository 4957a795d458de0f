"""The private and undocumented attributes of other libraries: each is named here, once, with its reason.

A release may rename any of them. ``tests/contrib/test_foreign.py`` then fails with the name. If the attribute is read,
the read raises ``AttributeError``, unless its comment says otherwise. An assignment would have no effect, so
``Assigned`` refuses it.

Three kinds of names are not here: imported ones, because a missing name fails the import; the interface that
third-party database backends implement, whose changes Django announces; and what a library documents.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from operator import attrgetter, methodcaller
from typing import Any, Final

from django.core.exceptions import ImproperlyConfigured
from django.db.transaction import Atomic, non_atomic_requests
from django.utils.version import get_version_tuple


@dataclass(frozen=True)
class Assigned:
    """An attribute that this package assigns, and that the library then uses."""

    library: str
    name: str
    #: What does not work if the library has no such attribute.
    purpose: str

    def __call__(self, owner: object, value: object) -> None:
        """:raises ImproperlyConfigured: ``owner`` has no such attribute."""
        if not hasattr(owner, self.name):
            version = getattr(sys.modules.get(self.library), "__version__", "of this version")
            raise ImproperlyConfigured(
                f"{self.library} {version} has no {type(owner).__name__}.{self.name}, without which "
                f"django-idempotency can't {self.purpose}. Install a release of {self.library} that is tested with it."
            )
        setattr(owner, self.name, value)


# Django: a request. No public function reports whether its body is read.

#: Absent until the body is buffered. Under another name, every body would be taken for unread.
BODY: Final = "_body"
#: Absent until a form is parsed. Under another name, every form would be taken for unparsed.
FILES: Final = "_files"
#: As ``FILES``, but middleware may assign it alone.
POST: Final = "_post"
#: Tells a parsed form from the empty one that Django sets for methods other than POST.
has_started: Final[Callable[[Any], bool]] = attrgetter("_read_started")
#: As Django does after a malformed form, because the error page reads the form again.
mark_parse_error: Final[Callable[[Any], None]] = methodcaller("_mark_post_parse_error")

# An upload above the memory limit is copied while it is fingerprinted, and the handler reads the copy.
set_stream: Final = Assigned("django", "_stream", "let a handler read an upload that was fingerprinted")
set_started: Final = Assigned("django", "_read_started", "let a handler read an upload that was fingerprinted")

# Django: a response and a view.

#: Frees an unsent response. ``close()`` would also send the signal ``request_finished``.
resource_closers: Final[Callable[[Any], list[Callable[[], object]]]] = attrgetter("_resource_closers")
#: The databases on which ATOMIC_REQUESTS doesn't apply to a view. Absent from most views.
NON_ATOMIC_REQUESTS: Final = "_non_atomic_requests"
_exempt: Final = Assigned("django", NON_ATOMIC_REQUESTS, "exempt protected views from ATOMIC_REQUESTS")


def exempt_on(view: object, databases: set[str]) -> None:
    """Set the databases on which ATOMIC_REQUESTS doesn't apply to a view.

    :raises ImproperlyConfigured: Django's own decorator sets another attribute.
    """
    _exempt(non_atomic_requests(lambda: None), databases)  # which refuses
    setattr(view, NON_ATOMIC_REQUESTS, databases)


# Django: the transactions of a connection.

in_atomic_block: Final[Callable[[Any], bool]] = attrgetter("in_atomic_block")
#: The open ``atomic()`` blocks, compared to detect a block that code left open or ended.
atomic_blocks: Final[Callable[[Any], list[Atomic]]] = attrgetter("atomic_blocks")
#: Nonempty within the transaction of a TestCase.
savepoint_ids: Final[Callable[[Any], list[Any]]] = attrgetter("savepoint_ids")
#: Unlike the public ``get_rollback()``, also readable after code has ended the block.
needs_rollback: Final[Callable[[Any], bool]] = attrgetter("needs_rollback")
#: ``execute_wrapper()`` adds only the innermost wrapper, and removes the last one.
execute_wrappers: Final[Callable[[Any], list[Any]]] = attrgetter("execute_wrappers")
#: The database of an ``atomic()`` block, and whether it refuses to be a savepoint.
database_of: Final[Callable[[Atomic], str]] = attrgetter("using")
is_durable: Final[Callable[[Atomic], bool]] = attrgetter("durable")
#: ``transaction.set_rollback()`` calls it. A handler's own call means that its success isn't recorded, unlike a mark
#: that Django sets after an error.
set_rollback_method: Final = Assigned("django", "set_rollback", "notice that a handler rolls back its transaction")
#: Gives a session of the renewal a timeout for each answer.
set_opener: Final = Assigned("django", "get_new_connection", "limit the wait for the database when it renews a lease")
#: Runs the callbacks of ``on_commit()``, and is replaced to simulate the death of a process after a COMMIT.
RUN_CALLBACKS: Final = "run_and_clear_commit_hooks"
on_commit_callbacks: Final[Callable[[Any], list[Any]]] = attrgetter("run_on_commit")
set_on_commit_callbacks: Final = Assigned("django", "run_on_commit", "simulate a crash after a COMMIT")
#: Present on SQLite. Otherwise threads of the testing kit fail on a database in memory.
IS_IN_MEMORY: Final = "is_in_memory_db"

# psycopg.

#: Whether the driver leaves out BEGIN. Its public setter refuses a change within a transaction. Without it, the driver
#: sends BEGIN as a separate message.
AUTOCOMMIT: Final = "_autocommit"
#: The releases in which it works as ``PostgreSQLWatch`` expects: from the first, before the second.
AUTOCOMMIT_TESTED: Final = ("3.2", "3.4")
#: The function with which a session waits for each answer. libpq has no timeout for it.
set_wait: Final = Assigned("psycopg", "wait", "limit the wait for the database when it renews a lease")
#: Not the driver's default wait function, which in some releases doesn't resume the generator.
wait_selector: Final[Callable[[Any], Callable[..., Any]]] = attrgetter("waiting.wait_selector")


@cache
def is_autocommit_tested(version: str) -> bool:
    first, end = (get_version_tuple(limit) for limit in AUTOCOMMIT_TESTED)
    return first <= get_version_tuple(version) < end


# asgiref.

#: The thread that runs the synchronous calls of a coroutine under ``async_to_sync``. Given ``AsyncToSync``.
executors: Final[Callable[[Any], Any]] = attrgetter("executors")
executor: Final[Callable[[Any], Any]] = attrgetter("current")
set_executor: Final = Assigned("asgiref", "current", "let the tasks of an async handler outlive it")
#: The attributes of ``SyncToAsync`` and of ``AsyncToSync`` that hold the function.
SYNC_FUNCTION: Final = "func"
ASYNC_FUNCTION: Final = "awaitable"

# Django REST framework.

#: Django's request inside of DRF's.
http_request: Final[Callable[[Any], Any]] = attrgetter("_request")
#: Present on DRF's requests, with the view and the arguments of its route.
PARSER_CONTEXT: Final = "parser_context"
#: Chooses the parser of a request.
negotiator: Final[Callable[[Any], Any]] = attrgetter("negotiator")
#: What ``as_view()`` leaves on a view: its class, its arguments, and the actions of a ViewSet by method. If absent, a
#: protected view counts as unprotected in the audit, and as a function when it is declared.
VIEW_CLASS: Final = "cls"
VIEW_ARGUMENTS: Final = "initkwargs"
VIEW_ACTIONS: Final = "actions"
#: The same actions on a view's instance.
ACTION_MAP: Final = "action_map"
#: Begins the qualified name of the handlers that ``@api_view`` makes. Otherwise a protected function counts as
#: unprotected.
API_VIEW: Final = "api_view.<locals>."
#: The operands of an expression of permissions. Otherwise their object checks are not called before a replay.
OPERANDS: Final = ("op1_class", "op2_class")
#: The headers that are added to every response of a view.
response_headers: Final[Callable[[Any], dict[str, str]]] = attrgetter("headers")
# dispatch() calls these after the handler. The handler's response is final, and its error has been handled.
set_finalize: Final = Assigned("rest_framework", "finalize_response", "finish a response once")
set_handle: Final = Assigned("rest_framework", "handle_exception", "handle an exception once")

# Django Ninja.

#: Renders what a handler returns. Only the response is an outcome.
RESULT_TO_RESPONSE: Final = "_result_to_response"
#: Present on a function that one of Ninja's decorators has registered. Otherwise ``@idempotent`` above it protects
#: nothing, which the audit reports.
NINJA_OPERATION: Final = "_ninja_operation"
#: The routes of a path. Of each: the decorated function, and what runs it.
operations_of: Final[Callable[[Any], list[Any]]] = attrgetter("operations")
function_of: Final[Callable[[Any], Callable[..., Any]]] = attrgetter("view_func")
run_of: Final[Callable[[Any], Callable[..., Any]]] = attrgetter("run")
#: The name of the parameter for the response, which may get headers, and how Ninja creates it.
response_argument: Final[Callable[[Any], Any]] = attrgetter("signature.response_arg")
create_response: Final[Callable[[Any], Callable[[Any], Any]]] = attrgetter("api.create_temporal_response")
#: Ninja's answer to a handler's exception.
on_exception: Final[Callable[[Any], Callable[[Any, Exception], Any]]] = attrgetter("api.on_exception")
#: Present on a route that streams its response. Otherwise such a response is refused only at a request.
STREAM_FORMAT: Final = "stream_format"
#: The description of a route in the schema.
response_models: Final[Callable[[Any], dict[Any, Any]]] = attrgetter("response_models")
description: Final[Callable[[Any], dict[str, Any] | None]] = attrgetter("openapi_extra")
set_description: Final = Assigned("ninja", "openapi_extra", "describe a protected route in the schema")
parameters: Final[Callable[[Any], list[Any]]] = attrgetter("models")
#: The location of parameters, and their names.
parameter_source: Final[Callable[[Any], str]] = attrgetter("__ninja_param_source__")
parameter_names: Final[Callable[[Any], list[str]]] = attrgetter("__ninja_flatten_map__")

# Celery.

#: The object behind ``current_app`` or ``current_task``. The proxy would refer to another one in another thread.
behind_proxy: Final[Callable[[Any], Any]] = methodcaller("_get_current_object")
#: Whether this process is a worker, which has imported its tasks, and what imports them.
is_worker: Final[Callable[[Any], bool]] = attrgetter("loader.worker_initialized")
import_tasks_of: Final[Callable[[Any], Callable[[], object]]] = attrgetter("loader.import_default_modules")
#: The queue and exchange of a task.
route_of: Final[Callable[[Any], Callable[..., dict[str, Any]]]] = attrgetter("amqp.router.route")
#: The name of an exception that Celery couldn't pickle. Otherwise a dead letter names Celery's wrapper.
EXCEPTION_NAME: Final = "exc_cls_name"

# drf-spectacular.

path: Final[Callable[[Any], str]] = attrgetter("path")
register_component: Final[Callable[[Any], Callable[[Any], None]]] = attrgetter("registry.register_on_missing")
