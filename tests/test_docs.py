"""The documentation: its examples run and do what they say, and every name in it exists."""

from __future__ import annotations

import inspect
import io
import json
import re
import sys
from collections.abc import Callable
from dataclasses import fields
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any
from uuid import UUID

import pytest
from django.core.management import load_command_class
from django.core.management.base import BaseCommand
from django.db.models.functions import Now
from django.dispatch import Signal
from django.http import HttpResponse
from django.test import RequestFactory, override_settings
from django.urls import resolve
from rest_framework import serializers
from rest_framework.test import APIRequestFactory, force_authenticate

import idempotency
from idempotency import checks, conf, exceptions, signals
from idempotency.lifecycle import Status
from idempotency.models import IdempotencyRecord, OutboxMessage
from idempotency.operation import DEFAULT_MAX_ATTEMPTS, Operation, registry
from idempotency.problems import problem
from idempotency.recovery import LONGEST_BACKOFF, recover_once
from idempotency.stats import Kind, Stats, counters
from testproject.models import Charge, Export, Notification, Transfer
from testproject.provider.faults import FAULTS
from tests.factories import RecordFactory, UserFactory
from tests.records import from_now

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
if not README.exists():
    pytest.skip("the tests stand outside of the checkout, without its documentation", allow_module_level=True)

PAGES = [README, *sorted((ROOT / "docs").glob("*.md"))]
FENCED = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)

Page = Callable[[str], dict[str, Any]]


def each_page() -> pytest.MarkDecorator:
    return pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)


def blocks(path: Path, *languages: str) -> list[str]:
    return [text for language, text in FENCED.findall(path.read_text()) if language in languages]


def table(text: str) -> list[list[str]]:
    """The rows of the tables in ``text``, as cells, without their heads."""
    rows = [re.split(r"(?<!\\)\|", line)[1:-1] for line in text.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in row] for row in rows]
    rules = [number for number, row in enumerate(cells) if all(cell and set(cell) <= set("-:") for cell in row)]
    return [row for number, row in enumerate(cells) if number not in rules and number + 1 not in rules]


def section(page: str, heading: str) -> str:
    """What stands below a heading of the second level."""
    _, found, rest = (ROOT / "docs" / page).read_text().partition(f"\n## {heading}\n")
    assert found, heading
    return rest.partition("\n## ")[0]


def code(cell: str) -> str | None:
    """What stands in backticks in a cell of a table, or None for a dash."""
    found = re.fullmatch(r"`([^`]+)`", cell)
    return found[1] if found else None


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
    declared = {operation.name for operation in registry}
    yield run
    for operation in registry:
        if operation.name not in declared:
            registry.discard(operation.name)


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


def test_every_signal_is_listed_with_its_arguments() -> None:
    rows = {code(row[0]): row for row in table((ROOT / "docs/signals.md").read_text()) if len(row) == 3}
    sent = {name for name, value in vars(signals).items() if isinstance(value, Signal)}
    assert set(rows) == sent
    assert {name: code(row[1]) for name, row in rows.items() if code(row[1])} == {
        "recovered": "status",
        "purged": "count",
        "relayed": "count",
    }


def test_every_number_of_the_statistics_is_listed() -> None:
    text = section("operations.md", "What to watch")
    listed = [name for row in table(text) for name in re.findall(r"`(\w+)`", row[0])]
    assert sorted(listed) == sorted(field.name for field in fields(Stats))
    assert [str(kind) for kind in Kind if f"`{kind}`" not in text] == []


@each_page()
def test_every_task_of_a_schedule_exists(path: Path) -> None:
    tasks = (ROOT / "idempotency/tasks.py").read_text()  # read, because Celery needn't be installed
    named = re.findall(r'"task": "([\w.]+)"', path.read_text())
    assert [name for name in named if f'name="{name}"' not in tasks] == []


def test_the_table_of_attempts_and_times_is_right() -> None:
    """An abandoned first attempt is reconciled as attempt 2, and each Unknown waits for two to the power of it."""
    rows = table(section("crashes.md", "`Unknown`: asked again, and parked in the end"))
    units = {"minutes": 60, "hour": 3600, "day": 86_400}
    for attempts, written in rows:
        number, unit = written.split()
        waits = sum(min(2**attempt, LONGEST_BACKOFF) for attempt in range(2, int(attempts.split(",")[0])))
        assert waits == pytest.approx(int(number) * units[unit], rel=0.1), attempts
    assert rows[0][0] == f"{DEFAULT_MAX_ATTEMPTS}, the default"


@pytest.mark.django_db
def test_the_envelope_replaces_the_problem(run_page: Page) -> None:
    envelope, view = run_page("policy.md")["envelope"], run_page("README.md")["create_transfer"]
    with override_settings(IDEMPOTENCY={"ERROR_RESPONSE": envelope}):
        response = post(view, {}, key="a,b")
    assert response.status_code == 400
    assert json.loads(response.content)["error"]["code"] == "idempotency_key_invalid"


def settings_table() -> list[list[str]]:
    _, _, text = README.read_text().partition("<!-- settings -->")
    return table(text.partition("<!-- end of settings -->")[0])


def test_the_table_has_every_setting_and_its_default() -> None:
    rows = {name: row for row in settings_table() if (name := code(row[0]))}
    assert set(rows) == conf.NAMES
    for name, row in rows.items():
        default = eval(code(row[3]) or "", {"timedelta": timedelta, "CONFLICT": idempotency.CONFLICT})
        assert conf.resolve(default) == getattr(conf.settings, name.lower()), name


def test_the_table_has_every_argument_of_an_operation() -> None:
    named = {argument for row in settings_table() if (argument := code(row[1]))}
    assert named == {name for name in inspect.signature(Operation).parameters if name != "name"}


def errors() -> list[type[exceptions.IdempotencyError]]:
    return [
        member
        for _, member in inspect.getmembers(exceptions, inspect.isclass)
        if issubclass(member, exceptions.IdempotencyError)
    ]


def test_the_wire_contract_has_every_answer() -> None:
    rows = {code(row[2]): row[1] for row in table((ROOT / "docs/wire.md").read_text()) if len(row) == 4}
    answers = {error.code: str(error.status_code) for error in errors() if "title" in vars(error)}
    # Over HTTP a lost lease is answered from the winner's record.
    del answers[exceptions.LeaseLostError.code], answers[exceptions.IdempotencyError.code]
    assert {answer: status for answer, status in rows.items() if answer} == answers


def test_the_problems_shown_are_those_that_are_sent() -> None:
    by_code = {error.code: error for error in errors()}
    shown = [
        json.loads(line)
        for block in blocks(ROOT / "docs/wire.md", "http")
        for line in block.splitlines()
        if line.startswith('{"type"')
    ]
    assert len(shown) >= 8
    for body in shown:
        assert body == problem(by_code[body["code"]](body["detail"]))


def test_every_public_name_is_in_the_reference() -> None:
    reference = (ROOT / "docs/api.md").read_text()
    spellings = {name: (f":: idempotency.{name}\n", f"`{name}`") for name in idempotency.__all__}
    assert [name for name, either in spellings.items() if not any(text in reference for text in either)] == []
    assert [error.__name__ for error in errors() if f".. autoexception:: {error.__name__}\n" not in reference] == []


def test_every_system_check_is_listed() -> None:
    used = set(re.findall(r"idempotency\.[EW]\d{3}", inspect.getsource(checks)))
    used |= {f"idempotency.{error_id}" for _, error_id in checks.SETTINGS.values()}
    listed = {code(row[0]) for row in table((ROOT / "docs/policy.md").read_text())}
    assert {check_id for check_id in listed if check_id and re.search(r"\.[EW]\d", check_id)} == used


#: The package's commands, and the section of the operations guide that each is explained in.
COMMANDS = {
    "purge_idempotency": "Purging",
    "recover_idempotency": "Recovery",
    "idempotency_stats": "What to watch",
}


@each_page()
@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_of_a_command_exists(name: str, path: Path) -> None:
    lines = [line for block in blocks(path, "sh", "text", "ini") for line in block.splitlines() if f" {name}" in line]
    parser = load_command_class("idempotency", name).create_parser("manage.py", name)
    for line in lines:
        parser.parse_args(line.partition(f" {name}")[2].split())


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_of_a_command_is_listed(name: str) -> None:
    options = options_of(load_command_class("idempotency", name)) - options_of(BaseCommand())
    cells = [code(row[0]) for row in table(section("operations.md", COMMANDS[name]))]
    assert {cell.split()[0] for cell in cells if cell and cell.startswith("--")} == options


def options_of(command: BaseCommand) -> set[str]:
    return set(re.findall(r"--[a-z-]+", command.create_parser("manage.py", "command").format_usage()))


@each_page()
def test_every_endpoint_of_the_sample_exists(path: Path) -> None:
    for endpoint in re.findall(r"`(?:[A-Z]+ )?(/[a-z/]+/)`|http://127\.0\.0\.1:8000(/[a-z/]+/)", path.read_text()):
        resolve("".join(endpoint))


@each_page()
def test_every_option_of_the_provider_exists(path: Path) -> None:
    commands = re.findall(r"python -m testproject\.provider(.*)", "\n".join(blocks(path, "sh")))
    named = set(re.findall(r"--[a-z-]+", " ".join(commands)))
    assert named <= set(re.findall(r'"(--[a-z-]+)"', (ROOT / "testproject/provider/__main__.py").read_text()))


def test_every_fault_of_the_provider_is_listed() -> None:
    rows = table(section("downstream.md", "The sample project's payouts"))
    assert [name for row in rows if len(row) == 2 and (name := code(row[0]))] == list(FAULTS)


def test_every_row_of_the_demo_that_is_explained_is_shown() -> None:
    shown = (ROOT / "testproject/demo/report.py").read_text()
    rows = table(section("downstream.md", "The sample project's payouts"))
    named = [name for row in rows if len(row) == 2 and not code(row[0]) for name in re.split(", and |, ", row[0])]
    named = [name.replace("run again", "run again, same derived key") for name in named if name != "same derived key"]
    assert len(named) >= 10
    assert [name for name in named if f'"{name}"' not in shown] == []


def test_the_indexes_are_named_as_they_are() -> None:
    named = {name for path in PAGES for name in re.findall(r"`(idempotency_record_\w+)`", path.read_text())}
    assert named == {index.name for index in IdempotencyRecord._meta.indexes}


@each_page()
def test_every_file_that_is_named_exists(path: Path) -> None:
    text = path.read_text()
    names = [name for name in re.findall(r"\]\(([^)#\s]+)", text) if "://" not in name]
    missing = [name for name in names if not (path.parent / name).exists()]
    missing += [name for name in re.findall(r"`(idempotency/[\w/]+\.py)`", text) if not (ROOT / name).exists()]
    assert missing == []
