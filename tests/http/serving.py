"""Serve a handler at a URL: protected or not, as a plain or a DRF view, as a function or a class."""

import copy
import functools
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from uuid import uuid4

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.db import transaction
from django.http import JsonResponse
from django.http.response import HttpResponseBase
from django.views.decorators.csrf import csrf_exempt
from rest_framework.decorators import api_view, parser_classes, renderer_classes
from rest_framework.parsers import FormParser, JSONParser, MultiPartParser
from rest_framework.response import Response

from idempotency import PARK, idempotent
from idempotency.contrib.rest_framework import IdempotentMixin
from testproject.authentication import token_required
from tests.http.callers import effects
from tests.http.views import Methods, drf_answer, plain_answer, work

PARSERS = (JSONParser, FormParser, MultiPartParser)

#: The policy of an operation whose effects no rollback undoes.
OUTSIDE = {"transaction": False, "recovery": PARK}

#: Runs a test with a ``policy`` argument twice: with and without a transaction around the handler.
policies = pytest.mark.parametrize("policy", [{}, OUTSIDE], ids=["in a transaction", "outside"])


def served(view):
    """Authenticate a plain view by the token. A DRF view authenticates itself and stays unchanged."""
    return view if hasattr(getattr(view, "cls", None), "handle_exception") else token_required(view)


def drf_view(view, *, parsers=PARSERS, renderers=None):
    if renderers is not None:
        view = renderer_classes(renderers)(view)
    return api_view(["POST", "PATCH"])(parser_classes(parsers)(view))


@dataclass(frozen=True)
class Framework:
    """Serves a handler as a plain or a DRF view. The handler returns JSON, JSON and a status, or a response."""

    name: str
    _serve: Callable

    def view(self, handler=None, protect=lambda view: view, **drf):
        def view(request, **route):
            answer = handler(request, **route)
            if isinstance(answer, HttpResponseBase):
                return answer
            body, status = answer if isinstance(answer, tuple) else (answer, 200)
            return Response(body, status) if self.name == "drf" else JsonResponse(body, status=status)

        if handler is None:
            handler = drf_answer if self.name == "drf" else plain_answer
        return drf_view(protect(view), **drf) if self.name == "drf" else protect(view)

    def serve(self, handler=None, *, operation="tests.operation", **policy):
        view = self.view(handler, idempotent(operation, **policy))
        # The package can't exempt a function below @api_view from ATOMIC_REQUESTS.
        self._serve(transaction.non_atomic_requests(view) if self.name == "drf" else view)

    def serve_twins(self, handler, **drf):
        """Serve an operation at ``/``, and the same handler unprotected at ``/twin/``."""
        self._serve(self.view(handler, idempotent("tests.twin"), **drf), **{"twin/": self.view(handler, **drf)})


def serve_answer(serve, make, *, framework="plain", renderers=None, **policy):
    """Serve an operation that takes effect and then returns the response of ``make``."""

    @idempotent("tests.answer", **policy)
    def view(request):
        work(request)
        return make()

    serve(drf_view(view, renderers=renderers) if framework == "drf" else view)


def parse_as_post(http):
    """Parse a form of any method, as Django Ninja's middleware does."""
    method, http.method = http.method, "POST"
    http.META["REQUEST_METHOD"] = "POST"
    http.POST  # noqa: B018 - parses the form
    http.META["REQUEST_METHOD"] = http.method = method


def after(act, view):
    """A view that runs ``act`` on the request first, as a middleware would."""

    @csrf_exempt
    def acting(request):
        act(request)
        return view(request)

    return acting


def part_of(request):
    """A copy of the request, with another key."""
    part = copy.copy(request)
    part.META = {**request.META, "HTTP_IDEMPOTENCY_KEY": "part"}
    return part


class Calling:
    """A decorator that is an object."""

    def __init__(self, handler):
        functools.update_wrapper(self, handler)
        self.handler = handler

    def __call__(self, *args):
        return self.handler(*args)

    def __get__(self, instance, owner=None):
        return self if instance is None else functools.partial(self, instance)


METHODS = ["GET", "POST", "PUT", "PATCH", "DELETE"]
WAYS = ["decorator", "mixin"]


class EveryMethod:
    def get(self, request):
        return plain_answer(request)

    post = put = patch = delete = get


class Declaring(IdempotentMixin):
    """A project's mixin, whose subclasses inherit the protection."""

    idempotent_operations = {"post": "tests.declaring"}


class Creating:
    """A project's mixin with a decorated method."""

    @idempotent("declarations.creating")
    def post(self, request):
        return drf_answer(request)

    put = Methods.put


@contextmanager
def refused(match):
    """Expect the block's declaration to be refused. Before Python 3.12, errors of ``__set_name__`` are wrapped."""
    with pytest.raises((ImproperlyConfigured, RuntimeError)) as raised:
        yield
    error = raised.value if isinstance(raised.value, ImproperlyConfigured) else raised.value.__cause__
    assert isinstance(error, ImproperlyConfigured)
    assert match in str(error)


def protecting(way, base, operations):
    if way == "mixin":
        return type(base.__name__, (IdempotentMixin, base), {"idempotent_operations": operations})
    return type(
        base.__name__, (base,), {name: idempotent(each)(getattr(base, name)) for name, each in operations.items()}
    )


def runs_once(alice, method, url="/"):
    """Whether a request and its retry take effect once, and a request without a key doesn't take effect."""
    before, key = effects(), str(uuid4())
    answers = [alice.request(method, url, key=key) for _ in range(2)]
    assert {answer.status_code for answer in answers} == {201}
    alice.request(method, url)
    return effects() == before + 1 and answers[1].content == answers[0].content
