"""Permissions on objects are checked before a replay, where DRF's view says how to find its object."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext
from rest_framework import serializers, viewsets
from rest_framework.decorators import action
from rest_framework.permissions import BasePermission, IsAuthenticated
from rest_framework.response import Response

from idempotency.contrib.rest_framework import IdempotentMixin
from testproject.models import Transfer
from tests.http.callers import Caller
from tests.http.serving import Serve

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.once]


class IsOwner(BasePermission):
    def has_object_permission(self, request: Any, view: Any, obj: Any) -> bool:
        return bool(obj.account == request.user)


class TransferSerializer(serializers.ModelSerializer[Transfer]):
    class Meta:
        model = Transfer
        fields: ClassVar = ["id", "label"]


class Transfers(IdempotentMixin, viewsets.ModelViewSet[Transfer]):
    queryset = Transfer.objects.all()
    serializer_class = TransferSerializer
    permission_classes: ClassVar = [IsAuthenticated & IsOwner]
    idempotent_operations: ClassVar = {
        "partial_update": "objects.update",
        "destroy": "objects.destroy",
        "lock": "objects.lock",
        "count": "objects.count",
        "open": "objects.open",
    }

    @action(detail=True, methods=["post"])
    def lock(self, request: Any, pk: str) -> Response:
        return Response({"label": self.get_object().label})

    @action(detail=False, methods=["post"])
    def count(self, request: Any) -> Response:
        return Response({"count": Transfer.objects.count()})

    @action(detail=True, methods=["post"], permission_classes=[IsAuthenticated])
    def open(self, request: Any, pk: str) -> Response:
        return Response({"label": self.get_object().label})

    def get_queryset(self) -> Any:
        return Transfer.objects.select_for_update() if self.action == "lock" else super().get_queryset()


@pytest.fixture
def transfer(alice: Caller, serve: Serve) -> Transfer:
    detail = {"patch": "partial_update", "delete": "destroy"}
    routes = {"<int:pk>/": detail, "<int:pk>/lock/": {"post": "lock"}, "<int:pk>/open/": {"post": "open"}}
    permitted = {"<int:pk>/open/": {"permission_classes": [IsAuthenticated]}}
    serve(
        Transfers.as_view({"post": "count"}),
        **{route: Transfers.as_view(actions, **permitted.get(route, {})) for route, actions in routes.items()},
    )
    return Transfer.objects.create(account=alice.user, recipient="carol", amount=1, label="mine")


def give_away(transfer: Transfer, new_owner: Caller) -> None:
    Transfer.objects.update(account=new_owner.user)


def test_who_has_lost_the_object_gets_no_replay(alice: Caller, bob: Caller, transfer: Transfer) -> None:
    def update() -> Any:
        return alice.request("PATCH", f"/{transfer.pk}/", {"label": "changed"}, key="k")

    first, replay = update(), update()
    assert (first.status_code, replay.status_code, replay["Idempotency-Replayed"]) == (200, 200, "true")
    give_away(transfer, bob)
    refused = update()
    assert refused.status_code == 403
    assert b"changed" not in refused.content
    assert (refused["Idempotency-Status"], refused["Idempotency-Key"]) == ("recorded", "k")
    assert "Idempotency-Replayed" not in refused
    give_away(transfer, alice)
    assert update().content == first.content


def test_the_first_request_of_somebody_else_is_refused_as_it_was(bob: Caller, transfer: Transfer) -> None:
    for _ in range(2):
        assert bob.request("PATCH", f"/{transfer.pk}/", {"label": "his"}, key="k").status_code == 403
    transfer.refresh_from_db()
    assert transfer.label == "mine"


def test_an_object_that_the_operation_has_deleted_has_nothing_to_check(alice: Caller, transfer: Transfer) -> None:
    answers = [alice.request("DELETE", f"/{transfer.pk}/", key="k") for _ in range(2)]
    assert [answer.status_code for answer in answers] == [204, 204]
    assert answers[1]["Idempotency-Status"] == "replayed"


@pytest.mark.except_sqlite
def test_the_views_query_may_lock_the_row(alice: Caller, bob: Caller, transfer: Transfer) -> None:
    answers = [alice.post(f"/{transfer.pk}/lock/", key="k") for _ in range(2)]
    assert answers[1]["Idempotency-Replayed"] == "true"
    give_away(transfer, bob)
    assert alice.post(f"/{transfer.pk}/lock/", key="k").status_code == 403


@pytest.mark.parametrize("url", ["/", "/{pk}/open/"])
def test_without_object_or_permissions_on_it_a_replay_costs_no_query_for_them(
    alice: Caller, transfer: Transfer, url: str
) -> None:
    url = url.format(pk=transfer.pk)
    alice.post(url, key="k")
    with CaptureQueriesContext(connection) as queries:
        assert alice.post(url, key="k")["Idempotency-Replayed"] == "true"
    assert not [query for query in queries.captured_queries if Transfer._meta.db_table in query["sql"]]
