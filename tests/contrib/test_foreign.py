"""The private names of other libraries, each looked up in the installed release."""

import ast
import re
from operator import attrgetter, methodcaller
from pathlib import Path
from unittest.mock import Mock

import django
import psycopg
import pytest
from asgiref.sync import AsyncToSync, SyncToAsync, async_to_sync
from celery import current_app
from celery.utils.serialization import UnpickleableExceptionWrapper
from django.core.exceptions import ImproperlyConfigured
from django.db import connection, transaction
from django.db.backends.sqlite3 import base as sqlite3
from django.http import HttpResponse
from django.test import RequestFactory
from drf_spectacular.openapi import AutoSchema
from drf_spectacular.plumbing import ComponentRegistry
from ninja import NinjaAPI
from ninja.params.models import HeaderModel
from psycopg.pq import ConnStatus
from rest_framework.decorators import api_view
from rest_framework.permissions import IsAdminUser, IsAuthenticated
from rest_framework.response import Response
from rest_framework.viewsets import ViewSet

import idempotency
from idempotency import foreign, idempotent
from idempotency.foreign import Assigned

PACKAGE = Path(idempotency.__file__).parent

#: Names that begin with an underscore and are documented.
DOCUMENTED = {"_base_manager", "_meta", "_replace", "_state"}

#: Attributes that this package adds to foreign objects, and parts of names.
OURS = {
    *("_idempotency_answered", "_idempotency_atomic_request", "_idempotency_ninja_operation", "_idempotency_parts"),
    *("_idempotency_store", "_self_idempotency_checks_nothing", "_changelist", "_list", "_retrieve"),
}


def new_request():
    return RequestFactory().post("/", {"a": "1"})


def with_form():
    request = new_request()
    assert request.POST
    return request


def with_body():
    request = new_request()
    assert request.body
    return request


class Things(ViewSet):
    permission_classes = ()

    def list(self, request):
        return Response([])


VIEW = Things.as_view({"get": "list"}, detail=False)


def instance():
    request = RequestFactory().get("/")
    return VIEW(request).renderer_context["view"]


def handler_of_api_view():
    view_class = api_view(["POST"])(lambda request: None).cls
    return view_class.post


def path_of_ninja():
    api = NinjaAPI(urls_namespace="foreign")
    api.post("/things")(lambda request: None)
    return next(iter(api.default_router.path_operations.values()))


def route():
    found = path_of_ninja().operations[0]
    found.api = NinjaAPI(urls_namespace="of_the_route")
    return found


def schema():
    made = AutoSchema()
    made.registry, made.path = ComponentRegistry(), "/"
    return made


#: For each name in ``foreign``, makes an object of the library that must have it.
OWNERS = {
    "BODY": with_body,
    "FILES": with_form,
    "POST": with_form,
    "has_started": new_request,
    "mark_parse_error": new_request,
    "set_stream": new_request,
    "set_started": new_request,
    "resource_closers": HttpResponse,
    "NON_ATOMIC_REQUESTS": lambda: transaction.non_atomic_requests(lambda: None),
    "in_atomic_block": lambda: connection,
    "atomic_blocks": lambda: connection,
    "savepoint_ids": lambda: connection,
    "needs_rollback": lambda: connection,
    "execute_wrappers": lambda: connection,
    "database_of": transaction.atomic,
    "is_durable": transaction.atomic,
    "set_rollback_method": lambda: connection,
    "set_opener": lambda: connection,
    "RUN_CALLBACKS": lambda: connection,
    "on_commit_callbacks": lambda: connection,
    "set_on_commit_callbacks": lambda: connection,
    "IS_IN_MEMORY": lambda: sqlite3.DatabaseWrapper,
    "AUTOCOMMIT": lambda: psycopg.Connection(Mock(status=ConnStatus.BAD)),
    "set_wait": lambda: psycopg.Connection,
    "wait_selector": lambda: psycopg,
    "executors": lambda: AsyncToSync,
    "executor": lambda: AsyncToSync.executors,
    "set_executor": lambda: AsyncToSync.executors,
    "SYNC_FUNCTION": lambda: SyncToAsync(with_form),
    "ASYNC_FUNCTION": lambda: AsyncToSync(SyncToAsync(with_form)),
    "http_request": lambda: instance().request,
    "PARSER_CONTEXT": lambda: instance().request,
    "negotiator": lambda: instance().request,
    "VIEW_CLASS": lambda: VIEW,
    "VIEW_ARGUMENTS": lambda: VIEW,
    "VIEW_ACTIONS": lambda: VIEW,
    "ACTION_MAP": instance,
    "API_VIEW": handler_of_api_view,
    "OPERANDS": lambda: IsAuthenticated | IsAdminUser,
    "response_headers": instance,
    "set_finalize": instance,
    "set_handle": instance,
    "RESULT_TO_RESPONSE": route,
    "NINJA_OPERATION": lambda: route().view_func,
    "operations_of": path_of_ninja,
    "function_of": route,
    "run_of": route,
    "response_argument": route,
    "create_response": route,
    "on_exception": route,
    "STREAM_FORMAT": route,
    "response_models": route,
    "description": route,
    "set_description": route,
    "parameters": route,
    "parameter_source": lambda: HeaderModel,
    "parameter_names": lambda: type("Model", (HeaderModel,), {"__ninja_flatten_map__": {}}),
    "behind_proxy": lambda: current_app,
    "is_worker": lambda: current_app,
    "import_tasks_of": lambda: current_app,
    "route_of": lambda: current_app,
    "EXCEPTION_NAME": lambda: UnpickleableExceptionWrapper("shop", "Refused", (), ""),
    "path": schema,
    "register_component": schema,
}

LISTED = {
    name: value
    for name, value in vars(foreign).items()
    if isinstance(value, (str, tuple, Assigned, attrgetter, methodcaller)) and not name.startswith("_")
}


def test_each_name_is_looked_up():
    assert set(OWNERS) == set(LISTED) - {"AUTOCOMMIT_TESTED"}


@pytest.mark.parametrize("name", OWNERS)
def test_the_installed_library_has(name):
    owner, listed = OWNERS[name](), LISTED[name]

    async def look_up():  # asgiref has an executor only here
        if isinstance(listed, (attrgetter, methodcaller)):
            listed(owner)
        elif name == "API_VIEW":
            assert owner.__qualname__.startswith(listed)
        else:
            names = [listed.name] if isinstance(listed, Assigned) else [listed] if isinstance(listed, str) else listed
            assert [each for each in names if not hasattr(owner, each)] == []

    async_to_sync(look_up)()


def test_the_installed_psycopg_is_in_the_tested_range():
    assert foreign.is_autocommit_tested(psycopg.__version__)


def test_an_assignment_that_would_have_no_effect_names_the_library_its_version_and_the_attribute():
    renamed = Assigned("django", "_body_stream", "let a handler read an upload")
    with pytest.raises(ImproperlyConfigured) as refusal:
        renamed(new_request(), b"")
    assert f"django {django.__version__} has no WSGIRequest._body_stream" in str(refusal.value)
    assert "can't let a handler read an upload" in str(refusal.value)


def listed_names():
    """The attributes that ``foreign`` names."""
    for value in LISTED.values():
        if isinstance(value, Assigned):
            yield value.name
        elif isinstance(value, (attrgetter, methodcaller)):
            yield value.__reduce__()[1][0].rpartition(".")[2]
        else:
            yield from [value] if isinstance(value, str) else value


def test_a_view_that_django_would_not_exempt_from_atomic_requests_is_refused_when_it_is_declared(monkeypatch):
    monkeypatch.setattr(foreign, "_exempt", Assigned("django", "_without_transactions", "exempt protected views"))
    with pytest.raises(ImproperlyConfigured, match=r"django [\d.]+ has no function\._without_transactions"):
        idempotent("unit.renamed_exemption")(lambda request: None)


#: Listed names that have other meanings as well, or are documented, but assigned here.
WORDS = {
    *("actions", "awaitable", "cls", "current", "description", "durable", "executors", "finalize_response", "func"),
    *(
        "get_new_connection",
        "handle_exception",
        "headers",
        "initkwargs",
        "models",
        "operations",
        "path",
        "route",
        "run",
    ),
    *("run", "set_rollback", "using", "wait"),
}


def used_in(tree):
    """The names of attributes of other objects in a module, and its texts."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            owner = node.value.func if isinstance(node.value, ast.Call) else node.value
            if not isinstance(owner, ast.Name) or owner.id not in {"self", "cls", "super", "foreign"}:
                yield node.attr
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def test_no_other_module_names_them():
    listed, found = set(listed_names()) - WORDS, []
    for path in PACKAGE.rglob("*.py"):
        if path.name != "foreign.py":
            for name in used_in(ast.parse(path.read_text())):
                is_private = re.fullmatch(r"_[a-z]\w*", name) and name not in DOCUMENTED
                if name in listed or (is_private and name not in OURS):
                    found.append(f"{path.relative_to(PACKAGE)}: {name}")
    assert found == []
