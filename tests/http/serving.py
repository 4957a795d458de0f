"""Ways to put a handler behind a URL: protected or not, as a view of Django's or of DRF's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from django.http import HttpRequest, JsonResponse
from django.http.response import HttpResponseBase
from rest_framework.decorators import api_view, parser_classes, renderer_classes
from rest_framework.parsers import BaseParser, FormParser, JSONParser, MultiPartParser
from rest_framework.response import Response

from idempotency import PARK, idempotent
from tests.http.views import drf_answer, plain_answer, work

Serve = Callable[..., Any]

PARSERS: Sequence[type[BaseParser]] = (JSONParser, FormParser, MultiPartParser)

#: An operation whose effects no rollback undoes.
OUTSIDE: dict[str, Any] = {"transaction": False, "recovery": PARK}

#: A transaction around the handler, and none, for a test that asks for a ``policy``.
policies = pytest.mark.parametrize("policy", [{}, OUTSIDE], ids=["in a transaction", "outside"])


def drf_view(view: Any, *, parsers: Any = PARSERS, renderers: Sequence[type[Any]] | None = None) -> Any:
    if renderers is not None:
        view = renderer_classes(renderers)(view)
    return api_view(["POST", "PATCH"])(parser_classes(parsers)(view))


@dataclass(frozen=True)
class Framework:
    """Serves a handler as a plain view or as a DRF view. It returns JSON, JSON and a status, or a response."""

    name: str
    _serve: Serve

    def view(self, handler: Any = None, protect: Callable[[Any], Any] = lambda view: view, **drf: Any) -> Any:
        def view(request: Any, **route: Any) -> Any:
            answer = handler(request, **route)
            if isinstance(answer, HttpResponseBase):
                return answer
            body, status = answer if isinstance(answer, tuple) else (answer, 200)
            return Response(body, status) if self.name == "drf" else JsonResponse(body, status=status)

        if handler is None:
            handler = drf_answer if self.name == "drf" else plain_answer
        return drf_view(protect(view), **drf) if self.name == "drf" else protect(view)

    def serve(self, handler: Any = None, *, operation: str = "tests.operation", **policy: Any) -> None:
        self._serve(self.view(handler, idempotent(operation, **policy)))

    def serve_twins(self, handler: Any, **drf: Any) -> None:
        """Serve an operation at ``/``, and the same handler unprotected at ``/twin/``."""
        self._serve(self.view(handler, idempotent("tests.twin"), **drf), **{"twin/": self.view(handler, **drf)})


def serve_answer(
    serve: Serve, make: Callable[[], Any], *, framework: str = "plain", renderers: Any = None, **policy: Any
) -> None:
    """Serve an operation that has its effect and then answers with what ``make`` makes."""

    @idempotent("tests.answer", **policy)
    def view(request: Any) -> Any:
        work(request)
        return make()

    serve(drf_view(view, renderers=renderers) if framework == "drf" else view)


def parse_as_post(http: HttpRequest) -> None:
    """Parse a form of any method, as Django Ninja's middleware does."""
    method, http.method = http.method, "POST"
    http.META["REQUEST_METHOD"] = "POST"
    http.POST  # noqa: B018 - parses the form
    http.META["REQUEST_METHOD"] = http.method = method
