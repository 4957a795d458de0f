"""The project of the documentation's examples, and a fixture that runs a page's code in it."""

import io
import re
import sys
from base64 import urlsafe_b64encode
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from unittest.mock import patch

import celery
import httpx
import pytest
import requests
from django.db import connections
from django.test import Client, RequestFactory, override_settings
from django.urls import path
from rest_framework import serializers

from idempotency import checks
from idempotency.outbox import publish
from idempotency.testing import Request, assert_idempotent
from testproject import models
from testproject.celery import app
from tests.contrib.conftest import inbox, redis_server  # noqa: F401 - fixtures
from tests.docs.pages import blocks
from tests.docs.servers import serving
from tests.factories import UserFactory
from tests.operations import free_names
from tests.outbox import SENDER, broker

#: Packages whose examples run only if they are installed.
OPTIONAL = {"adrf", "corsheaders", "django_tenants", "graphql"}
OPTIONAL |= {"ninja", "strawberry"}
#: Packages with models, which ``test_moving.py`` installs in a separate process.
ELSEWHERE = {"rest_framework_idempotency_key"}


#: The models of the examples.
SHOP_MODELS = ("Charge", "Export", "Notification", "Payout", "Transfer")


class ShopChargeSerializer(serializers.ModelSerializer):
    class Meta:
        model = models.Charge
        fields = ("id", "amount", "currency")


class Provider:
    """The ``shop.provider`` of the examples. It deduplicates nothing."""

    def __init__(self):
        self.paid = []

    def pay(self, key, amount):
        self.paid.append((str(key), amount))
        return {"id": len(self.paid)}


@pytest.fixture
def provider():
    return Provider()


@pytest.fixture
def server():
    with serving() as running:
        yield running


@pytest.fixture
def run_page(monkeypatch, provider):
    """Run a page's Python. A block that begins with a file name becomes that module, which later blocks can import. Any
    other block continues the previous one. Published messages go to the tests' broker.
    """
    clients = []

    def install(name, **names):
        module = ModuleType(name)
        vars(module).update(names)
        parent, _, child = name.rpartition(".")
        if parent in sys.modules:
            monkeypatch.setattr(sys.modules[parent], child, module, raising=False)
        monkeypatch.setitem(sys.modules, name, module)
        return module

    def run(name):
        defined = {}
        for source in blocks(name, "python"):
            imported = set(re.findall(r"^(?:from|import) (\w+)", source, re.MULTILINE))
            if imported & ELSEWHERE or any(find_spec(package) is None for package in imported & OPTIONAL):
                continue
            file = re.match(r"# (\S+)\.py\n", source)
            module = install(file[1].replace("/", ".")) if file else ModuleType("example")
            vars(module).update({} if file else defined, DATABASES={"default": {}})
            exec(compile(source, f"{name}: {module.__name__}", "exec"), vars(module))
            if file and file[1] == "settings":
                shown = {key: value for key, value in vars(module).items() if key == "IDEMPOTENCY"}
                with (
                    override_settings(ROOT_URLCONF=(), **shown),
                    patch.dict(connections.settings, {**vars(module)["DATABASES"], **connections.settings}),
                ):
                    assert checks.check_settings(None) == []
            defined.update({key: value for key, value in vars(module).items() if not key.startswith("__")})
            kinds = httpx.Client | requests.Session
            clients.extend(value for value in vars(module).values() if isinstance(value, kinds))
        return defined

    monkeypatch.setenv("RECORD_KEYS", urlsafe_b64encode(bytes(32)).decode())
    install("shop")
    install("shop.models", **{name: getattr(models, name) for name in SHOP_MODELS})
    install("shop.serializers", ChargeSerializer=ShopChargeSerializer)
    install("shop.provider", pay=provider.pay, ship=provider.pay)
    install("shop.reports", make_report=lambda request: "7", open_report=lambda report_id: io.BytesIO(b"a,b\n1,2\n"))
    install("shop.imports", import_orders=lambda request: (["order-71"], ["order-72"]))
    monkeypatch.setitem(publish.__kwdefaults__, "sender", SENDER)
    broker.reset()
    # A shared task would be added to every app that a later test makes.
    monkeypatch.setattr(celery, "shared_task", lambda **options: app.task(shared=False, lazy=False, **options))
    app.set_current()
    known = set(app.tasks)
    import_module("testproject.urls")  # declares its operations while their names are theirs
    with free_names():
        yield run
    for client in clients:
        client.close()
    for name in set(app.tasks) - known:
        app.tasks.pop(name)


def post(view, payload, *, key="k", user=None):
    request = RequestFactory().post("/", payload, content_type="application/json", headers={"Idempotency-Key": key})
    request.user = UserFactory() if user is None else user
    return view(request)


def repeat_in_every_way(view, payload, rows, settings, **options):
    """Run ``assert_idempotent`` on the view, and count the rows that it writes."""
    settings.ROOT_URLCONF = (path("operate/", view),)
    clients = Client(), Client()
    for client in clients:
        client.force_login(UserFactory())
    request = Request("POST", "/operate/", payload, content_type="application/json")
    given = {"other_client": clients[1], "revoke": clients[0].logout} | options
    assert_idempotent(clients[0], request, effects=rows, **given)


def twice(view, payload):
    user = UserFactory()
    answers = [post(view, payload, user=user) for _ in range(2)]
    assert ["Idempotency-Replayed" in answer for answer in answers] == [False, True]
    return answers
