"""``audit``: reads the URLconf and the views, and reports for each mutating route whether its protection works."""

from __future__ import annotations

import dis
import inspect
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from fnmatch import fnmatchcase
from types import CodeType, FunctionType
from typing import Any, Final

from django.conf import settings as django_settings
from django.utils import translation
from django.views import View
from django.views.generic import RedirectView

from ..conf import settings
from ..foreign import VIEW_ARGUMENTS
from ..http.adapter import adapters, handlers_of
from ..http.atomic_requests import is_within_atomic_requests
from ..http.protection import SAFE_METHODS, RoutedHandler, around, protection_of
from ..http.stack import class_of, decorator_stack
from ..operation import Operation
from .checks import (
    PRECONDITION_ABOVE,
    PRECONDITION_BELOW,
    exemption_of,
    mistakes_in,
    model_written_elsewhere,
    refused_requests,
)
from .decorators import dotted
from .layers import is_within_precondition
from .routes import Place, places

#: The methods of Django's managers that write.
WRITES: Final = {
    f"{prefix}{name}"
    for prefix in ("", "a")
    for name in ("create", "bulk_create", "bulk_update", "delete", "get_or_create", "update", "update_or_create")
}

#: The names of locks in Python, and of PostgreSQL's and MariaDB's in SQL that outlive a transaction.
LOCK: Final = re.compile(r"(?:\w*_)?(?:r?lock|mutex|semaphore)|\w*(?:Lock|Semaphore)|advisory|acquire")
LOCK_IN_SQL: Final = re.compile(r"\b(?:pg_(?:try_)?advisory_lock|get_lock)(?:_shared)?(?=\s*\()", re.IGNORECASE)


class Verdict(StrEnum):
    """The audit's verdict on a method of a route."""

    PROTECTED = "protected"
    BROKEN = "broken"  # an operation is declared, but the protection does not work
    DOUBTFUL = "doubtful"  # the protection may not work, for the given reasons
    UNPROTECTED = "unprotected"
    UNDECLARED = "undeclared"  # an unprotected view whose methods are unknown
    IDEMPOTENT = "idempotent"  # an unprotected PUT or DELETE, which HTTP defines as idempotent
    ALLOWED = "allowed"  # unprotected, as the project intends


@dataclass(frozen=True)
class AuditedRoute:
    """One mutating method of one route."""

    #: In capitals; "ANY" if the view's methods are unknown.
    method: str
    #: The path, with its variable parts as names in angle brackets.
    route: str
    #: The name of the URL with its namespaces; empty if it has none.
    name: str
    #: The dotted path of the function, or of the class and its handler.
    view: str
    verdict: Verdict
    operation: Operation | None
    #: Sentences that explain the verdict.
    reasons: tuple[str, ...]

    def as_dict(self) -> dict[str, object]:
        """The route as JSON members. If it is unprotected, ``operation`` and its options are None."""
        plain = {**vars(self), "verdict": str(self.verdict), "reasons": list(self.reasons)}
        if self.operation is None:
            return {**plain, **dict.fromkeys(("recovery", "transaction", "key_required"))}
        return {
            **plain,
            "operation": self.operation.name,
            "recovery": self.operation.recovery.value,
            "transaction": self.operation.declared["transaction"],
            "key_required": self.operation.policy.key_required,
        }


@dataclass(frozen=True)
class Audit:
    """The result of ``audit``."""

    routes: tuple[AuditedRoute, ...]
    #: How many routes of Django's admin were left out.
    admin_routes: int
    #: The patterns of ``allow`` that no route matched.
    unused: tuple[str, ...]


def audit(*, allow: Collection[str] = (), include_admin: bool = False) -> Audit:
    """Audit every mutating method of every route of ``ROOT_URLCONF``.

    :param allow: shell patterns for the paths, names or views of routes that may be unprotected.
    :param include_admin: whether to include the routes of Django's admin.
    :raises ImproperlyConfigured: the project's URLs can't be read.
    """
    found: dict[tuple[str, ...], AuditedRoute] = {}
    seen: set[tuple[object, ...]] = set()
    left_out, used = 0, set()
    # Translated routes are shown in the project's language.
    with translation.override(django_settings.LANGUAGE_CODE):
        for place in places():
            if place.in_admin and not include_admin:
                left_out += 1
                continue
            identity = (place.name, id(place.callback))
            if "format" in place.parameters and identity in seen:
                continue  # DRF's second route to the same view
            seen.add(identity)
            for route in _routes_of(place):
                texts = (route.route, route.name, route.view)
                matching = {pattern for pattern in allow if any(fnmatchcase(text, pattern) for text in texts)}
                used |= matching
                intended = matching and route.verdict in {Verdict.UNPROTECTED, Verdict.UNDECLARED}
                judged = replace(route, verdict=Verdict.ALLOWED) if intended else route
                # Each operation of a path has a pattern in Django Ninja, which leads to all operations of the path.
                found.setdefault((judged.method, judged.route, judged.view, judged.verdict), judged)
    return Audit(tuple(found.values()), left_out, tuple(pattern for pattern in allow if pattern not in used))


def _routes_of(place: Place) -> Iterator[AuditedRoute]:
    view_class, handlers = class_of(place.callback), handlers_of(place.callback)
    has_handlers = any(routed.methods - {"OPTIONS"} for routed in handlers)  # every class answers OPTIONS
    if view_class is not None and view_class.dispatch is not View.dispatch and not has_handlers:
        doubt = "The class has no handlers, so its dispatch() may serve any method."
        view = f"{dotted(view_class)}.dispatch"
        yield AuditedRoute("ANY", place.route, place.name, view, Verdict.UNDECLARED, None, (doubt,))
    for routed in handlers:
        view = f"{dotted(view_class)}.{routed.name}" if routed.name else dotted([*decorator_stack(routed.handler)][-1])
        if routed.methods:
            methods = _served(routed, place.callback, view_class)
        else:
            operation = routed.operation
            methods = () if operation is None else operation.policy.methods
            if not set(settings().defaults.methods) <= set(methods):
                yield AuditedRoute("ANY", place.route, place.name, view, Verdict.UNDECLARED, None, ())
        for method in sorted(set(methods) - SAFE_METHODS):
            operation = routed.operation_for(method)
            calls_post = method == "PUT" and routed.name == "post" and "POST" in methods
            if calls_post and operation is routed.operation_for("POST"):
                continue  # nothing to add to the route for POST, because Django's put() calls post()
            if operation is None:
                # A handler that also serves POST runs again for a repeated PUT.
                is_idempotent = routed.methods.isdisjoint(settings().defaults.methods)
                verdict = Verdict.IDEMPOTENT if is_idempotent else Verdict.UNPROTECTED
                reasons = tuple(_overridden(routed, view_class))
            else:
                verdict, reasons = _judged(operation, place, routed, view_class)
            yield AuditedRoute(method, place.route, place.name, view, verdict, operation, reasons)


def _served(routed: RoutedHandler, callback: Any, view_class: Any) -> Collection[str]:
    if routed.name and routed.handler is getattr(RedirectView, routed.name, None):
        return ()  # a redirect has no effect
    arguments = getattr(callback, VIEW_ARGUMENTS, getattr(callback, "view_initkwargs", {}))
    allowed = arguments.get("http_method_names", getattr(view_class, "http_method_names", None))
    return [method for method in routed.methods if allowed is None or method.lower() in allowed]


def _judged(
    operation: Operation, place: Place, routed: RoutedHandler, view_class: Any
) -> tuple[Verdict, tuple[str, ...]]:
    """The verdict on a protected handler, and the reasons."""
    mistakes = [*mistakes_in(place.callback, routed), *refused_requests(place.callback, operation)]
    if is_within_atomic_requests(place.callback):
        mistakes.append(
            f"ATOMIC_REQUESTS opens a transaction around the view, where no claim can be committed: every request is "
            f"refused. {exemption_of(routed)}"
        )
    found = (adapter.doubts_about(place.callback, place.parameters) for adapter in adapters)
    doubts = [doubt for doubts in found for doubt in doubts]
    if is_within_precondition(around(place.callback, view_class, routed)):
        doubts.append(f"{PRECONDITION_ABOVE} {PRECONDITION_BELOW}")
    doubts += _ways_around(routed.name, view_class)
    if (model := model_written_elsewhere(view_class, operation)) is not None:
        elsewhere = f"{model._meta.label} is written to another database than the records, outside of the transaction."
        doubts = [elsewhere, *doubts]
    codes = [*_codes([*decorator_stack(routed.handler)][-1], view_class)]
    doubts += _refused_by(operation, codes)
    doubts += _too_early(operation, codes)
    notes = [] if operation.policy.key_required else ["A request without a key runs unprotected (key_required=False)."]
    notes += [
        f"{dotted(base)}.dispatch() runs before a replay. If it validates or throttles, a retry may get its refusal "
        f"instead of the recorded outcome."
        for base in _own_bases(view_class)
        if "dispatch" in vars(base)
    ]
    verdict = Verdict.BROKEN if mistakes else Verdict.DOUBTFUL if doubts else Verdict.PROTECTED
    return verdict, (*mistakes, *doubts, *notes)


def _ways_around(name: str, view_class: Any) -> Iterator[str]:
    """Sentences on methods of a class that may call something else than its protected handler."""
    for base in _own_bases(view_class):
        for method in filter(inspect.isfunction, vars(base).values()):
            code = inspect.unwrap(method).__code__
            if method.__name__ == "dispatch" and {"dispatch", "getattr"}.isdisjoint(code.co_names):
                yield (
                    f"{dotted(base)}.dispatch() finds its handler in another way than Django, so it may call an "
                    f"unprotected one. Let it call super().dispatch()."
                )
            if any(each.opname == "STORE_ATTR" and each.argval == name for each in dis.get_instructions(code)):
                yield (
                    f"{dotted(base)}.{method.__name__}() assigns {name} of an instance, which hides the protected "
                    f"handler. Call the other function in {name}() instead."
                )


def _own_bases(view_class: Any) -> Iterator[type]:
    """A class and its bases, without the framework's."""
    for base in getattr(view_class, "__mro__", ()):
        if base.__module__.partition(".")[0] not in {"builtins", "django", "rest_framework"}:
            yield base


def _refused_by(operation: Operation, codes: Collection[CodeType]) -> Iterator[str]:
    """What a handler may do that an operation answers with 500. Takes the arguments of ``_too_early``."""
    names = _names_in(codes)
    if operation.declared["transaction"]:
        # The names of the keyword arguments of a call are a constant.
        if any("durable" in constant for code in codes for constant in code.co_consts if type(constant) is tuple):
            yield (
                "The handler names durable=, and Django refuses atomic(durable=True) within the operation's "
                "transaction: RuntimeError. Leave durable=True out, or declare the operation with transaction=False."
            )
        if "transaction" in names and (ends := {"commit", "rollback", "set_autocommit"} & names):
            yield (
                f"The handler names {' and '.join(sorted(ends))}, which Django refuses within the operation's "
                f"transaction. Use atomic(), or declare the operation with transaction=False."
            )
    streams = {"FileResponse", "StreamingHttpResponse"} & names
    if streams and operation.declared["rebuild"] is None:
        yield f"The handler names {' and '.join(sorted(streams))}, which can't be recorded: 500. Declare rebuild=."


def _names_in(codes: Collection[CodeType]) -> set[str]:
    return {name for code in codes for name in (*code.co_names, *code.co_freevars)}


def _too_early(operation: Operation, codes: Collection[CodeType]) -> Iterator[str]:
    """What a handler seems to commit or to end before its outcome is committed.

    :param codes: the code of the handler and of the functions that it calls. Names prove nothing, so they only
        raise doubts.
    """
    names = _names_in(codes)
    is_in_transaction = operation.declared["transaction"] or "begin" in names
    if not is_in_transaction and ("save" in names or ("objects" in names and names & WRITES)):
        yield (
            "The handler seems to write rows without begin(). They are committed before the outcome, so after a crash "
            "they stay, and another attempt writes them again. Call current_claim().begin() before the first row."
        )
    texts = [constant for code in codes for constant in code.co_consts if isinstance(constant, str)]
    locks = {name for name in names if LOCK.fullmatch(name)}
    locks |= {found[0] for text in texts if (found := LOCK_IN_SQL.search(text))}
    if locks and is_in_transaction and "hold" not in names:
        yield (
            f"The handler seems to take a lock ({', '.join(sorted(locks))}). It ends before the operation's COMMIT, "
            f"because atomic() in the handler is a savepoint. Take it by `with idempotency.hold(lock):`, or above the "
            f"protection."
        )


def _codes(handler: Any, view_class: Any) -> Iterator[CodeType]:
    """The code of a handler, and of the functions of its class and its module that it leads to by their names."""
    found = [handler]
    for function in found:
        codes = [function.__code__] if isinstance(function, FunctionType) else []
        for code in codes:
            yield code
            codes += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
            for name in code.co_names:
                named = inspect.getattr_static(view_class, name, None) or handler.__globals__.get(name)
                if isinstance(named, FunctionType) and named not in found:
                    found.append(named)


def _overridden(routed: RoutedHandler, view_class: Any) -> Iterator[str]:
    """A sentence on an unprotected method that may call a protected one."""
    bases = getattr(view_class, "__mro__", ())
    known = next(filter(None, (protection_of(vars(base).get(routed.name)) for base in bases)), None)
    if known is not None and routed.operation is None:
        yield (
            f"It overrides a handler that operation {known.operation.name!r} protects, and is protected only if it "
            f"calls that handler. Put @idempotent on the override."
        )
