"""The checks of models that are written to another database than the records, and of headers that browsers may send."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest
from django.apps import apps
from django.core.checks import run_checks
from django.urls import include, path
from django.views.generic import CreateView
from rest_framework import generics
from rest_framework.routers import SimpleRouter
from rest_framework.views import APIView

from idempotency import Operation, idempotent
from idempotency.checks import check_settings
from idempotency.contrib.rest_framework import IdempotentMixin
from idempotency.http.checks import check_cors, check_models, check_visitors
from testproject.models import Transfer
from tests.http.serving import OUTSIDE
from tests.http.views import LabelSerializer, Methods, ModelActions, PlainView, plain_answer

pytestmark = [pytest.mark.failure_mode(27), pytest.mark.urls(__name__)]


@pytest.mark.parametrize(
    ("installed", "allowed", "warned"),
    [
        (True, None, True),
        (True, ["accept"], True),
        (True, ["accept", "Idempotency-Key"], False),
        (False, None, False),
    ],
)
def test_browsers_have_to_be_allowed_to_send_the_header(
    settings: Any, monkeypatch: pytest.MonkeyPatch, installed: bool, allowed: Any, warned: bool
) -> None:
    monkeypatch.setattr(apps, "is_installed", lambda name: installed and name == "corsheaders")
    if allowed is not None:
        settings.CORS_ALLOW_HEADERS = allowed
    assert [message.id for message in check_cors(None)] == ["idempotency.W012"] * warned


class TransfersElsewhere:
    def db_for_write(self, model: type, **hints: Any) -> str | None:
        return "elsewhere" if model is Transfer else None


def named() -> list[str]:
    return [f"{message.id} {message.msg}" for message in run_checks() if message.id == "idempotency.W010"]


class Transfers(IdempotentMixin, ModelActions):
    idempotent_operations: ClassVar = {"create": "urls.create", "update": Operation("urls.update", **OUTSIDE)}


class BySerializer(IdempotentMixin, Methods, generics.GenericAPIView[Any]):
    serializer_class = LabelSerializer
    idempotent_operations: ClassVar = {"put": "urls.put"}


class ByModel(CreateView):
    model = Transfer
    post = idempotent("urls.post")(PlainView.post)


class WithoutModel(IdempotentMixin, Methods, APIView):
    idempotent_operations: ClassVar = {"post": "urls.unknown"}


router = SimpleRouter()
router.register("transfers", Transfers)
urlpatterns = [
    path("api/", include(router.urls)),
    path("serializer/", BySerializer.as_view()),
    path("model/", ByModel.as_view()),
    path("unknown/", WithoutModel.as_view()),
    path("function/", plain_answer),
]


def test_a_model_that_is_written_elsewhere_is_warned_of(settings: Any) -> None:
    assert named() == []
    settings.DATABASE_ROUTERS = [TransfersElsewhere()]
    found = named()
    assert len(found) == 3
    for operation, view in (("create", "Transfers"), ("put", "BySerializer"), ("post", "ByModel")):
        assert any(f"Operation 'urls.{operation}' of {view} has transaction=True" in message for message in found)
    assert all("testproject.Transfer is written to database 'elsewhere'" in message for message in found)


VIEWS = """
from idempotency import idempotent

@idempotent("late.visitors", account="idempotency.http.accounts.user_or_visitor")
def contact(request): ...

@idempotent("late.broken", account="no.such.function")
def broken(request): ...

urlpatterns = []
"""


@pytest.mark.parametrize(
    ("check", "expected"), [(check_visitors, "idempotency.W011"), (check_settings, "idempotency.E018")]
)
def test_a_check_knows_the_operations_of_views_that_nothing_has_imported_yet(
    settings: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, check: Any, expected: str
) -> None:
    """Django runs its checks in any order, and one of its own imports the URLconf."""
    name = f"late_urls_of_{check.__name__}"
    (tmp_path / f"{name}.py").write_text(VIEWS)
    monkeypatch.syspath_prepend(tmp_path)
    settings.ROOT_URLCONF = name
    assert expected in {message.id for message in check(None)}


def test_a_project_without_urls_has_nothing_to_check(settings: Any) -> None:
    settings.DATABASE_ROUTERS = [TransfersElsewhere()]
    settings.ROOT_URLCONF = None
    assert check_models(None) == check_visitors(None) == []
