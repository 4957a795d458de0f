"""``KeyStatusView`` as a DRF view: with the project's authentication, permissions, throttles and renderers."""

from __future__ import annotations

from typing import Any

from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView

from ...http.key_status import asked_operation, tell_status
from ...operation import Operation
from .adapter import RestFrameworkAdapter


class KeyStatusView(APIView):
    """Tells the owner of an Idempotency-Key what has become of it, without running anything."""

    operation: str | Operation | None = None

    def get(self, request: Request, **route: Any) -> Response:
        response: Response = tell_status(
            asked_operation(self.operation, route), RestFrameworkAdapter(request), Response
        )
        return response
