"""The view of a key's status as an ``APIView``, with the schema of its answers."""

from __future__ import annotations

from typing import Any

from rest_framework import serializers
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView

from ...http.key_status import asked_policy, tell_status
from ...operation import Operation
from .adapter import RestFrameworkAdapter


class KeyStatusSerializer(serializers.Serializer[Any]):
    """The members of an answer about one operation. No choices, which would rename the choices of a project's own."""

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
    """The members of an answer about all operations."""

    keys: ListedKeySerializer = ListedKeySerializer(many=True)


class KeyStatusView(APIView):
    """Answers the owner of an Idempotency-Key with the status of the key, without running anything."""

    operation: str | Operation | None = None
    #: For schemas.
    serializer_class = KeyStatusSerializer

    def get(self, request: Request, **route: Any) -> Response:
        policy = asked_policy(self.operation, route)
        response: Response = tell_status(policy, RestFrameworkAdapter(request), Response)
        return response
