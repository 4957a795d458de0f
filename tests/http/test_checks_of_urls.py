"""The check of models that are written to another database than the records."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
from django.core.checks import run_checks
from django.urls import include, path
from django.views.generic import CreateView
from rest_framework import generics, viewsets
from rest_framework.routers import SimpleRouter
from rest_framework.views import APIView

from idempotency import PARK, Operation, idempotent
from idempotency.contrib.rest_framework import IdempotentMixin
from idempotency.http.checks import check_models
from testproject.models import Transfer
from tests.http.views import TransferSerializer, drf_answer, plain_answer

pytestmark = pytest.mark.failure_mode(27)


class TransfersElsewhere:
    def db_for_write(self, model: type, **hints: Any) -> str | None:
        return "elsewhere" if model is Transfer else None


def named() -> list[str]:
    return [f"{message.id} {message.msg}" for message in run_checks() if message.id == "idempotency.W010"]


class Transfers(IdempotentMixin, viewsets.ModelViewSet[Transfer]):
    queryset = Transfer.objects.all()
    idempotent_operations: ClassVar = {
        "create": "urls.create",
        "update": Operation("urls.update", transaction=False, recovery=PARK),
    }


class BySerializer(IdempotentMixin, generics.GenericAPIView[Any]):
    serializer_class = TransferSerializer
    idempotent_operations: ClassVar = {"put": "urls.put"}

    def put(self, request: Any) -> Any:
        return drf_answer(request)


class ByModel(CreateView):
    model = Transfer

    @idempotent("urls.post")
    def post(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        return plain_answer(request)


class WithoutModel(IdempotentMixin, APIView):
    idempotent_operations: ClassVar = {"post": "urls.unknown"}

    def post(self, request: Any) -> Any:
        return drf_answer(request)


router = SimpleRouter()
router.register("transfers", Transfers)
urlpatterns = [
    path("api/", include(router.urls)),
    path("serializer/", BySerializer.as_view()),
    path("model/", ByModel.as_view()),
    path("unknown/", WithoutModel.as_view()),
    path("function/", plain_answer),
]


@pytest.fixture
def urls_here(settings: Any) -> Any:
    settings.ROOT_URLCONF = tuple(urlpatterns)
    return settings


def test_a_model_that_is_written_elsewhere_is_warned_of(urls_here: Any) -> None:
    urls_here.DATABASE_ROUTERS = [TransfersElsewhere()]
    found = named()
    assert len(found) == 3
    for operation, view in (("create", "Transfers"), ("put", "BySerializer"), ("post", "ByModel")):
        assert any(f"Operation 'urls.{operation}' of {view} has transaction=True" in message for message in found)
    assert all("testproject.Transfer is written to database 'elsewhere'" in message for message in found)


def test_a_model_beside_the_records_is_right(urls_here: Any) -> None:
    assert named() == []


def test_a_project_without_urls_has_nothing_to_check(urls_here: Any) -> None:
    urls_here.DATABASE_ROUTERS = [TransfersElsewhere()]
    urls_here.ROOT_URLCONF = None
    assert check_models(None) == []
