"""System checks of protected views and their operations."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any

from django.apps import AppConfig
from django.core import checks
from django.core.checks import CheckMessage, Tags, register
from django.core.exceptions import ImproperlyConfigured
from django.db import router
from django.db.models import Model

from .. import foreign
from ..conf import mistakes_in_settings
from ..http.adapter import frameworks_without_adapter, handlers_of
from ..http.atomic_requests import (
    beside_records,
    databases_with_atomic_requests,
    is_within_atomic_requests,
    opened_here,
)
from ..http.problems import PROFILES
from ..http.protection import RoutedHandler, around, protection_of
from ..http.stack import class_of, instance_within
from ..operation import Operation, Policy, registry
from ..options.values import ACCEPTED, Attach
from ..store import records_database
from .decorators import refuse_class
from .layers import is_within_atomic, is_within_precondition
from .routes import places

PRECONDITION_ABOVE = (
    "condition, etag or last_modified is above the protection. The operation changes what If-Match is compared with, "
    "so the retry of an executed request gets 412."
)
PRECONDITION_BELOW = "Put it below @idempotent, closest to the function."


def check(*tags: str) -> Callable[[Callable[[], Iterator[CheckMessage]]], Callable[..., list[CheckMessage]]]:
    """Register a generator of messages as a system check."""

    def decorate(find: Callable[[], Iterator[CheckMessage]]) -> Callable[..., list[CheckMessage]]:
        def run(app_configs: Sequence[AppConfig] | None, **kwargs: Any) -> list[CheckMessage]:
            return list(find())

        return register("idempotency", *tags)(run)

    return decorate


def declared_operations() -> list[Operation]:
    """All operations, after importing the views and task modules. No other check need have run before."""
    registry.load()
    list(places())
    return list(registry)


@check(Tags.urls)
def check_models() -> Iterator[CheckMessage]:
    written: defaultdict[tuple[str, str], set[str]] = defaultdict(set)
    for place in places():
        view_class = class_of(place.callback)
        for operation in filter(None, (routed.operation for routed in handlers_of(place.callback))):
            model = model_written_elsewhere(view_class, operation)
            if model is not None:
                databases = records_database(operation=operation.name), router.db_for_write(model)
                written[databases].add(f"{operation.name!r} of {view_class.__name__} ({model._meta.label})")
    for (records, using), operations in sorted(written.items()):
        yield checks.Warning(
            f"The operations of these views have transaction=True in the records' database, {records!r}, but their "
            f"models are written to database {using!r}: {', '.join(sorted(operations))}. A crash between the commits "
            f"leaves an effect without its outcome, and a retry runs the operation again.",
            hint=f"Keep the records in {using!r}, or declare the operations with transaction=False and their recovery.",
            id="idempotency.W010",
        )


def model_written_elsewhere(view_class: Any, operation: Operation) -> type[Model] | None:
    """The model of a class-based view, if it is written outside the operation's transaction."""
    meta = getattr(getattr(view_class, "serializer_class", None), "Meta", None)
    named = (getattr(source, "model", None) for source in (getattr(view_class, "queryset", None), view_class, meta))
    model = next((model for model in named if isinstance(model, type) and issubclass(model, Model)), None)
    if model is None or not operation.declared["transaction"]:
        return None
    return None if router.db_for_write(model) == records_database(operation=operation.name) else model


@check(Tags.urls)
def check_atomic_requests() -> Iterator[CheckMessage]:
    for place in places() if databases_with_atomic_requests() else ():
        found = {routed.operation: routed for routed in handlers_of(place.callback) if routed.operation is not None}
        for refusal in sorted({each for operation in found for each in refused_requests(place.callback, operation)}):
            yield checks.Error(f"{place.route}: {refusal}", id="idempotency.E031")
        if found and is_within_atomic_requests(place.callback):
            yield checks.Error(
                f"ATOMIC_REQUESTS opens a transaction around {place.route}, where no claim of "
                f"{', '.join(map(repr, sorted(operation.name for operation in found)))} can be committed: every "
                f"request is refused.",
                hint=exemption_of(next(iter(found.values()))),
                id="idempotency.E031",
            )


def exemption_of(routed: RoutedHandler) -> str:
    """How to exempt a handler from ATOMIC_REQUESTS, if its URL's callback does not show the protection to Django."""
    if routed.caller is not None:  # of Django Ninja
        return (
            "Mark the callback of each pattern of api.urls with django.db.transaction.non_atomic_requests. Read "
            "api.urls once, because each access makes new views."
        )
    if routed.name:
        return (
            "Put @idempotent above the other decorators of the method, or mark the view of the URL with "
            "django.db.transaction.non_atomic_requests."
        )
    return "Write @transaction.non_atomic_requests above all other decorators of the function, such as @api_view."


def refused_requests(callback: Any, operation: Operation) -> Iterator[str]:
    """Why requests under ``operation`` are refused: ATOMIC_REQUESTS is on for databases without its records."""
    for using in opened_here(callback):
        if using != records_database(operation=operation.name):
            yield beside_records(operation, using)


@check(Tags.urls)
def check_declarations() -> Iterator[CheckMessage]:
    for place in places():
        found = (mistakes_in(place.callback, routed) for routed in handlers_of(place.callback))
        for mistake in dict.fromkeys(chain.from_iterable(found)):
            yield checks.Error(f"{place.route}: {mistake}", id="idempotency.E033")


def mistakes_in(callback: Any, routed: RoutedHandler) -> Iterator[str]:
    """Why a URL's callback refuses every request to a protected handler, or does not protect it as declared."""
    view_class = class_of(callback)
    try:
        if view_class is not None:
            refuse_class(view_class, [routed])  # as_view() of a class was not guarded if a decorator hid the protection
    except ImproperlyConfigured as error:
        yield str(error)
    else:
        if routed.operation is not None and is_within_atomic(around(callback, view_class, routed)):
            yield (
                f"transaction.atomic is above {routed.operation}, where no claim can be committed: every request is "
                f"refused. Remove it, because the handler runs in the operation's transaction."
            )


@check(Tags.urls)
def check_preconditions() -> Iterator[CheckMessage]:
    for place in places():
        view_class = class_of(place.callback)
        operations = {
            routed.operation.name
            for routed in handlers_of(place.callback)
            if routed.operation is not None and is_within_precondition(around(place.callback, view_class, routed))
        }
        if operations:
            yield checks.Warning(
                f"{place.route} of {', '.join(map(repr, sorted(operations)))}: {PRECONDITION_ABOVE}",
                hint=PRECONDITION_BELOW,
                id="idempotency.W025",
            )


@check(Tags.urls)
def check_ninja() -> Iterator[CheckMessage]:
    # Views of Django REST framework need no check, because without their adapter every request is an error.
    if "ninja" not in frameworks_without_adapter():
        return
    # Without Ninja's class there are no routes. Another package may have imported an untested release of Ninja.
    kind = getattr(sys.modules.get("ninja.operation"), "PathView", ())
    views = [view for place in places() if (view := instance_within(place.callback, kind)) is not None]
    protections = [protection_of(foreign.function_of(route)) for view in views for route in foreign.operations_of(view)]
    if names := sorted({protection.operation.name for protection in protections if protection is not None}):
        yield checks.Warning(
            f"'ninja' is not in INSTALLED_APPS, so Django Ninja's routes of {', '.join(map(repr, names))} are treated "
            f"as plain views: they refuse requests, or run a PUT or DELETE unprotected.",
            hint="Add 'ninja' to INSTALLED_APPS.",
            id="idempotency.W026",
        )


@check()
def check_profiles() -> Iterator[CheckMessage]:
    if mistakes_in_settings():  # which another check reports
        return
    for operation in (each for each in declared_operations() if not each.mistakes()):
        subject = f"Operation {operation.name!r} of profile {operation.policy.profile!r}"
        for problem, hint in _broken_rules(operation.policy):
            yield checks.Warning(f"{subject} {problem}.", hint=hint, id="idempotency.W020")


def _broken_rules(policy: Policy) -> Iterator[tuple[str, str]]:
    """The profile's rules that an operation breaks, each with a hint."""
    profile = PROFILES[policy.profile]
    if policy.retention < profile.least_retention:
        yield (
            f"keeps its outcomes for {policy.retention}",
            f"The profile requires at least {profile.least_retention}: set a longer retention= or RETENTION.",
        )
    if profile.needs_key and not policy.key_required:
        yield "lets a request without a key run", "The profile refuses such a request: leave out key_required=False."
    if profile.forgets_server_errors and any(map(policy.recordable, range(500, 600))):
        yield (
            "records responses with a status of 5xx",
            "The profile requires a retry after a 5xx to run again: let recordable= or RECORDABLE return False for it.",
        )
    if profile.needs_conflict and (policy.in_progress is ACCEPTED or isinstance(policy.in_progress, Attach)):
        yield (
            "answers a duplicate of a running request with 202",
            "The profile requires 409: leave in_progress= at CONFLICT or Wait.",
        )
