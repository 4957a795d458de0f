"""``KeyStatusView`` as an ``APIView``, with the schemas of its responses."""

from __future__ import annotations

from typing import Any

from rest_framework import serializers
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView

from ...http.key_status import queried_policy, status_response
from ...operation import Operation
from .adapter import RestFrameworkAdapter


class KeyStatusSerializer(serializers.Serializer[Any]):
    """The status under one operation. Without choices, which could rename the project's choices in its schema."""

    status: serializers.CharField = serializers.CharField(
        help_text="in_progress, completed, recoverable, parked or unknown"
    )
    response_status: serializers.IntegerField = serializers.IntegerField(allow_null=True)
    created_at: serializers.DateTimeField = serializers.DateTimeField(allow_null=True)
    completed_at: serializers.DateTimeField = serializers.DateTimeField(allow_null=True)
    expires_at: serializers.DateTimeField = serializers.DateTimeField(allow_null=True)


class ListedKeySerializer(KeyStatusSerializer):
    operation: serializers.CharField = serializers.CharField()


class KeyStatusListSerializer(serializers.Serializer[Any]):
    """The statuses under all operations."""

    keys: ListedKeySerializer = ListedKeySerializer(many=True)


class KeyStatusView(APIView):
    """Reports the status of an Idempotency-Key to its owner, without running anything."""

    operation: str | Operation | None = None
    #: For schemas.
    serializer_class = KeyStatusSerializer

    def get(self, request: Request, **route: Any) -> Response:
        policy = queried_policy(self.operation, route)
        response: Response = status_response(policy, RestFrameworkAdapter(request), Response)
        return response
