"""The documentation's examples run, and do what they say."""

from __future__ import annotations

import io
import json
import re
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any
from uuid import UUID

import pytest
from django.db.models.functions import Now
from django.http import HttpResponse
from django.test import RequestFactory, override_settings
from rest_framework import serializers
from rest_framework.test import APIRequestFactory, force_authenticate

import idempotency
from idempotency import checks
from idempotency.lifecycle import Status
from idempotency.models import IdempotencyRecord, OutboxMessage
from idempotency.upkeep.stats import counters
from idempotency.upkeep.sweep import recover_once
from testproject.models import Charge, Export, Notification, Transfer
from tests.docs.pages import PAGES, blocks, each_page
from tests.factories import RecordFactory, UserFactory
from tests.operations import forgetting_operations
from tests.records import from_now

Page = Callable[[str], dict[str, Any]]


class ShopChargeSerializer(serializers.ModelSerializer[Charge]):
    class Meta:
        model = Charge
        fields = ("id", "amount", "currency")


class Provider:
    """What the examples call ``shop.provider``. It deduplicates nothing."""

    class ProviderError(Exception):
        """Nobody knows."""

    def __init__(self) -> None:
        self.paid: list[tuple[str, int]] = []
        #: What goes wrong with the next payment: "before" it or "after" it.
        self.fails = ""

    def names(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("ProviderError", "pay", "ship", "find")}

    def pay(self, key: UUID, amount: int, *, valid_until: float | None = None) -> dict[str, Any]:
        fails, self.fails = self.fails, ""
        if fails == "before":
            raise self.ProviderError
        self.paid.append((str(key), amount))
        if fails == "after":
            raise self.ProviderError
        return {"id": len(self.paid), "amount": amount}

    def ship(self, key: UUID, payout_id: int) -> dict[str, Any]:
        return {"id": self.pay(key, payout_id)["id"]}

    def find(self, key: UUID) -> dict[str, Any] | None:
        found = [number for number, (paid, _) in enumerate(self.paid) if paid == str(key)]
        return {"id": found[0] + 1, "amount": self.paid[found[0]][1]} if found else None


@pytest.fixture
def provider() -> Provider:
    return Provider()


@pytest.fixture
def run_page(monkeypatch: pytest.MonkeyPatch, provider: Provider) -> Any:
    """Runs a page's Python, block by block, in a project that has an app named ``shop``.

    A block that begins with the name of a file becomes that module, so that later blocks can import it. The answer
    is all that the blocks of the page have defined.
    """

    def install(name: str, **names: Any) -> ModuleType:
        module = ModuleType(name)
        vars(module).update(names)
        parent, _, child = name.rpartition(".")
        if parent in sys.modules:
            monkeypatch.setattr(sys.modules[parent], child, module, raising=False)
        monkeypatch.setitem(sys.modules, name, module)
        return module

    def run(name: str) -> dict[str, Any]:
        defined: dict[str, Any] = {}
        [path] = [path for path in PAGES if path.name == name]
        for source in blocks(path, "python"):
            file = re.match(r"# (\S+)\.py\n", source)
            module = install(file[1].replace("/", ".") if file else "example", DATABASES={"default": {}})
            exec(compile(source, f"{name}: {module.__name__}", "exec"), vars(module))
            if file and file[1] == "settings":
                with override_settings(**{key: value for key, value in vars(module).items() if key == "IDEMPOTENCY"}):
                    assert checks.check_settings(None) == []
            defined.update(vars(module))
        return defined

    install("shop")
    install("shop.models", Charge=Charge, Export=Export, Transfer=Transfer, Notification=Notification)
    install("shop.serializers", ChargeSerializer=ShopChargeSerializer)
    install("shop.provider", **provider.names())
    install("shop.reports", make_report=lambda request: "7", open_report=lambda report_id: io.BytesIO(b"a,b\n1,2\n"))
    with forgetting_operations():
        yield run


def post(view: Any, payload: object, *, key: str = "k", user: Any = None) -> HttpResponse:
    request = RequestFactory().post("/", payload, content_type="application/json", headers={"Idempotency-Key": key})
    request.user = UserFactory() if user is None else user
    response: HttpResponse = view(request)
    return response


@each_page()
def test_every_example_runs(path: Path, run_page: Page) -> None:
    run_page(path.name)


@pytest.mark.django_db
def test_the_job_is_started_once_and_its_duplicates_attach(run_page: Page) -> None:
    view, user = run_page("jobs.md")["create_export"], UserFactory()
    running = [post(view, {"label": "march"}, user=user) for _ in range(2)]
    export = Export.objects.get()
    assert [(answer.status_code, answer["Location"]) for answer in running] == [(202, f"/exports/{export.pk}/")] * 2
    assert OutboxMessage.objects.get().topic == "shop.tasks.run_export"
    Export.objects.update(finished_at=Now(), charges=3)
    ended = post(view, {"label": "march"}, user=user)
    assert (ended.status_code, ended["Idempotency-Replayed"], json.loads(ended.content)["charges"]) == (200, "true", 3)


@pytest.mark.django_db
@pytest.mark.parametrize("name", ["README.md", "quickstart.md"])
def test_the_plain_view_takes_effect_once(name: str, run_page: Page) -> None:
    view, user = run_page(name)["create_transfer"], UserFactory()
    first, retry = (post(view, {"recipient": "carol", "amount": 5}, user=user) for _ in range(2))
    assert (first.status_code, retry.status_code, retry.content) == (201, 201, first.content)
    assert retry["Idempotency-Replayed"] == "true"
    assert Transfer.objects.count() == 1


@pytest.mark.django_db
@pytest.mark.parametrize("name", ["README.md", "quickstart.md", "payloads.md"])
def test_the_viewset_takes_effect_once(name: str, run_page: Page) -> None:
    viewset, user = run_page(name)["ChargeViewSet"], UserFactory()
    if name == "payloads.md":
        viewset.perform_create = lambda self, serializer: serializer.save(account=self.request.user)
    view = viewset.as_view({"post": "create"})

    def send() -> HttpResponse:
        payload = {"amount": 1000, "currency": "usd"}
        request = APIRequestFactory().post("/", payload, format="json", headers={"Idempotency-Key": "k"})
        force_authenticate(request, user)
        response: HttpResponse = view(request)
        return response

    first, retry = send(), send()
    assert (first.status_code, retry.content) == (201, first.content)
    assert retry["Idempotency-Replayed"] == "true"
    assert Charge.objects.count() == 1


@pytest.mark.django_db
def test_the_block_outside_of_http_keeps_its_result(run_page: Page) -> None:
    send = run_page("quickstart.md")["send_invoice"]
    assert [send("a", "message-1", {"email": "x@example.org"}) for _ in range(2)] == [{"sent_to": "x@example.org"}] * 2


@pytest.mark.django_db
def test_the_streamed_report_is_rebuilt(run_page: Page) -> None:
    view, user = run_page("outcomes.md")["create_report"], UserFactory()
    first, retry = (post(view, {}, user=user) for _ in range(2))
    assert b"".join(first) == b"".join(retry) == b"a,b\n1,2\n"
    assert retry["Idempotency-Replayed"] == "true"
    assert IdempotencyRecord.objects.get().response_reference == "7"


@pytest.mark.django_db
@pytest.mark.parametrize("fails", ["", "before", "after"])
def test_the_payout_is_made_once_whatever_the_provider_does(fails: str, run_page: Page, provider: Provider) -> None:
    view, user = run_page("downstream.md")["send_payout"], UserFactory()
    provider.fails = fails
    first = post(view, {"amount": 7}, user=user)
    if fails:
        assert first.status_code == 502
        assert post(view, {"amount": 7}, user=user).status_code == 409  # the claim is kept for the rest of its lease
        IdempotencyRecord.objects.update(lease_expires_at=from_now(-timedelta(seconds=1)))
    answers = [post(view, {"amount": 7}, user=user) for _ in range(2)]
    assert {(answer.status_code, answer.content) for answer in answers} == {(201, b'{"id": 1, "amount": 7}')}
    assert len(provider.paid) == 1


@pytest.mark.django_db
def test_the_order_goes_on_behind_its_finished_step(
    run_page: Page, provider: Provider, monkeypatch: pytest.MonkeyPatch
) -> None:
    view, user = run_page("downstream.md")["place_order"], UserFactory()
    with monkeypatch.context() as patched:
        patched.setattr("shop.provider.ship", lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            post(view, {}, user=user)
    assert json.loads(post(view, {}, user=user).content) == {"payout": 1, "parcel": 2}
    assert len(provider.paid) == 2


@pytest.mark.django_db
def test_the_examples_derive_what_they_say(run_page: Page) -> None:
    keys_of_this_operation = run_page("downstream.md")["keys_of_this_operation"]
    with idempotency.claim("docs.derive", account_id="1", key="k") as run:
        keys = keys_of_this_operation()
        run.result = None
    assert (keys["charge"].version, len(keys["payout"])) == (8, 30)
    record = IdempotencyRecord.objects.get()
    assert keys == {"charge": record.derive_key("provider.charge"), "payout": record.derive_text("bank.payout", 30)}


@pytest.mark.django_db
def test_the_newsletter_is_written_once(run_page: Page) -> None:
    view, user = run_page("crashes.md")["send_newsletter"], UserFactory()
    assert [post(view, {}, user=user).status_code for _ in range(2)] == [201, 201]
    assert Notification.objects.count() == 2


@pytest.mark.django_db
def test_a_parked_record_is_resolved_by_what_was_found_out(run_page: Page) -> None:
    resolve = run_page("operations.md")["resolve"]
    idempotency.Operation("docs.parked", transaction=False, recovery=idempotency.PARK)
    for payout_id, status in ((None, Status.RECOVERABLE), (7, Status.COMPLETED)):
        record = RecordFactory(parked=True, operation="docs.parked")
        resolve(record.account_id, record.operation, record.idempotency_key, payout_id, "alice")
        record.refresh_from_db()
        assert (record.status, record.response_status) == (status, 201 if payout_id else None)


@pytest.mark.django_db
def test_the_alarms_are_off_in_an_empty_table(run_page: Page) -> None:
    counters.reset()
    assert not any(run_page("operations.md")["alarms"]().values())


@pytest.mark.django_db
def test_a_parked_record_pages_somebody(run_page: Page) -> None:
    page = run_page("signals.md")
    claim = RecordFactory(abandoned=True, operation="docs.parked")
    idempotency.Operation("docs.parked", transaction=False, recovery=idempotency.PARK)
    assert recover_once().parked == 1
    assert page["PAGES"] == [f"docs.parked of account {claim.account_id}: outcome unknown after attempt 1"]


@pytest.mark.django_db
def test_the_envelope_replaces_the_problem(run_page: Page) -> None:
    envelope, view = run_page("policy.md")["envelope"], run_page("README.md")["create_transfer"]
    with override_settings(IDEMPOTENCY={"ERROR_RESPONSE": envelope}):
        response = post(view, {}, key="a,b")
    assert response.status_code == 400
    assert json.loads(response.content)["error"]["code"] == "idempotency_key_invalid"
