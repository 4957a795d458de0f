"""Every name and number in the documentation exists, and what has to be listed is."""

from __future__ import annotations

import ast
import inspect
import json
import pkgutil
import re
import shlex
from collections.abc import Callable
from dataclasses import fields
from datetime import timedelta

import pytest
from django.contrib.auth.models import Permission
from django.core.management import load_command_class
from django.core.management.base import BaseCommand
from django.dispatch import Signal
from django.urls import Resolver404, resolve

import idempotency
from idempotency import exceptions, log, signals
from idempotency.contrib import metrics
from idempotency.contrib.opentelemetry import spans
from idempotency.http.problems import problem
from idempotency.models import IdempotencyRecord
from idempotency.options.table import OPTIONS, SETTINGS
from idempotency.options.values import DEFAULT_MAX_ATTEMPTS
from idempotency.protocol.recovery import LONGEST_BACKOFF
from idempotency.upkeep.counters import Counters
from idempotency.upkeep.stats import Precision, Stats
from testproject.demo.acts import ORDERS, PAYOUTS, Act
from testproject.provider.faults import FAULTS
from tests.docs.pages import PAGES, ROOT, blocks, code, each_page, section, table, text_of

pytestmark = pytest.mark.once


def test_every_signal_is_listed_with_its_arguments() -> None:
    rows = {code(row[0]): row for row in table(text_of("reference/signals.md")) if len(row) == 3}
    sent = {name for name, value in vars(signals).items() if isinstance(value, Signal)}
    assert set(rows) == sent
    assert {name: code(row[1]) for name, row in rows.items() if code(row[1])} == {
        "recovered": "status",
        "purged": "count",
        "relayed": "count",
    }


def test_every_number_of_the_statistics_is_listed() -> None:
    page = "reference/statistics.md"
    listed = [name for row in table(section(page, "The numbers")) for name in re.findall(r"`(\w+)`", row[0])]
    assert sorted(listed) == sorted(field.name for field in fields(Stats))
    kinds = [code(row[0]) for row in table(section(page, "How far a number can be trusted"))]
    assert kinds == [str(kind) for kind in Precision]


def test_the_table_of_attempts_and_times_is_right() -> None:
    """An abandoned first attempt is reconciled as attempt 2, and each Unknown waits for two to the power of it."""
    rows = table(section("explanation/crashes.md", "`Unknown`: asked again, and parked in the end"))
    units = {"minutes": 60, "hour": 3600, "day": 86_400}
    for attempts, written in rows:
        number, unit = written.split()
        waits = sum(min(2**attempt, LONGEST_BACKOFF) for attempt in range(2, int(attempts.split(",")[0])))
        assert waits == pytest.approx(int(number) * units[unit], rel=0.1), attempts
    assert rows[0][0] == f"{DEFAULT_MAX_ATTEMPTS}, the default"


def settings_table() -> list[list[str]]:
    return table(between("reference/settings.md", "settings"))


def test_the_table_of_settings_is_the_declaration() -> None:
    declared = {option.name: option for option in (*OPTIONS.values(), *SETTINGS.values())}
    rows = {name: row for row in settings_table() if (name := (code(row[1]) or (code(row[0]) or "").lower()))}
    assert set(rows) == set(declared)
    words = {"timedelta": timedelta, "CONFLICT": idempotency.CONFLICT, "REEXECUTE": idempotency.REEXECUTE}
    for name, (setting, argument, takes, default, meaning) in rows.items():
        option = declared[name]
        assert (code(setting), code(argument) == name) == (option.setting, option.is_argument), name
        assert (takes, meaning) == (option.takes, option.meaning), name
        assert eval(code(default) or "", words) == option.default, name


def errors() -> list[type[exceptions.IdempotencyError]]:
    return [
        member
        for _, member in inspect.getmembers(exceptions, inspect.isclass)
        if issubclass(member, exceptions.IdempotencyError)
    ]


def test_the_wire_contract_has_every_answer() -> None:
    rows = {code(row[2]): row[1] for row in table(text_of("reference/wire.md")) if len(row) == 4}
    answers = {error.code: str(error.status_code) for error in errors() if "title" in vars(error)}
    # Over HTTP a lost lease is answered from the winner's record.
    del answers[exceptions.LeaseLostError.code], answers[exceptions.IdempotencyError.code]
    assert {answer: status for answer, status in rows.items() if answer} == answers


def between(name: str, mark: str) -> str:
    _, _, text = text_of(name).partition(f"<!-- {mark} -->")
    return text.partition(f"<!-- end of {mark} -->")[0]


def test_every_code_of_a_problem_has_its_remedy() -> None:
    rows = {code(row[0]) for row in table(between("how-to/troubleshoot.md", "codes"))}
    assert rows == {error.code for error in errors() if "title" in vars(error)} - {exceptions.IdempotencyError.code}


def test_every_message_that_has_a_remedy_is_written_somewhere() -> None:
    trees = [ast.parse(path.read_text()) for path in sorted((ROOT / "idempotency").rglob("*.py"))]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    texts = [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    said = re.sub("%[a-z]", "", "\n".join(texts))
    rows = table(between("how-to/troubleshoot.md", "messages"))
    messages = [code(row[0]) or "" for row in rows]
    assert all(messages)
    assert len(messages) > 20
    assert [part for message in messages for part in message.split("…") if part.strip(" :") not in said] == []


def test_the_problems_shown_are_those_that_are_sent() -> None:
    by_code = {error.code: error for error in errors()}
    shown = [
        json.loads(line)
        for block in blocks("reference/wire.md", "http")
        for line in block.splitlines()
        if line.startswith('{"type"')
    ]
    assert len(shown) >= 8
    for body in shown:
        assert body == problem(by_code[body["code"]](body["detail"]))


def test_every_public_name_is_in_the_reference() -> None:
    reference = text_of("reference/api.md")
    spellings = {name: (f":: idempotency.{name}\n", f"`{name}`") for name in idempotency.__all__}
    assert [name for name, either in spellings.items() if not any(text in reference for text in either)] == []
    assert [error.__name__ for error in errors() if f".. autoexception:: {error.__name__}\n" not in reference] == []


def test_every_documented_object_exists() -> None:
    names = re.findall(r"\.\. auto(?:function|class):: (idempotency[\w.]*)", text_of("reference/api.md"))
    assert len(names) >= 40
    assert [name for name in names if not _exists(name)] == []


TASKS = (ROOT / "idempotency/tasks.py").read_text()  # read, because Celery needn't be installed
PROVIDER_OPTIONS = {*re.findall(r'"(--[a-z-]+)"', (ROOT / "testproject/provider/__main__.py").read_text())}


def is_endpoint(path: str) -> bool:
    try:
        return bool(resolve(path))
    except Resolver404:
        return False


#: Loggers, and what OpenTelemetry gets: attributes and events of spans, metrics.
LOGGED_AND_TRACED = {"idempotency.audit", log.EVENTS, spans.OPERATION, spans.ATTEMPT, spans.RESULT} | {
    f"idempotency.{name.removeprefix('idempotency_')}"
    for name in (*Counters.WATCHED, metrics.EVENTS, *(one.name for one in (*metrics.COUNTS, *metrics.GAUGES)))
}


def is_dotted_name(name: str) -> bool:
    """Whether it is a check, a permission, logged or traced, or can be reached from a module by its attributes."""
    if re.search(r"\.[EW]\d{3}$", name) or name in LOGGED_AND_TRACED:
        return True
    return Permission.objects.filter(codename=name.removeprefix("idempotency.")).exists() or _exists(name)


#: What pages name, by the pattern that finds it; and whether it is there.
NAMED: dict[str, tuple[str, Callable[[str], bool]]] = {
    "task of a schedule": (r'"task": "([\w.]+)"', lambda name: f'name="{name}"' in TASKS),
    "endpoint of the sample": (r"`(?:[A-Z]+ )?(/[a-z/]+/)`", is_endpoint),
    "endpoint of the tutorial": (r"http://127\.0\.0\.1:8000(/[a-z/]+/)", is_endpoint),
    "options of the provider": (
        r"python -m testproject\.provider(.*)",
        lambda options: set(re.findall(r"--[a-z-]+", options)) <= PROVIDER_OPTIONS,
    ),
    "file": (r"`((?:idempotency|testproject|docs)/[\w/-]+\.\w+)`", lambda file: (ROOT / file).exists()),
    "dotted name": (r"`(idempotency(?:\.\w+)+)", is_dotted_name),
}


@pytest.mark.django_db
@each_page()
def test_everything_that_is_named_exists(name: str) -> None:
    for what, (pattern, exists) in NAMED.items():
        missing = [named for named in re.findall(pattern, text_of(name)) if not exists(named)]
        assert missing == [], what
    links = [link for link in re.findall(r"\]\(([^)#\s]+)", text_of(name)) if "://" not in link]
    assert [link for link in links if not (PAGES[name].parent / link).exists()] == []


def test_every_pattern_finds_what_it_is_for() -> None:
    everything = "\n".join(map(text_of, PAGES))
    assert [what for what, (pattern, _) in NAMED.items() if not re.search(pattern, everything)] == []


def _exists(name: str) -> bool:
    """Whether it is a module, or can be reached from one by its attributes."""
    try:
        pkgutil.resolve_name(name)
    except (AttributeError, ImportError):
        return False
    return True


def test_every_system_check_is_listed() -> None:
    sources = [path.read_text() for path in sorted((ROOT / "idempotency").rglob("*.py"))]
    used = set(re.findall(r'"(idempotency\.[EW]\d{3})"', "".join(sources)))
    used |= {option.check_id for option in SETTINGS.values()}
    listed = [code(row[0]) for row in table(text_of("reference/checks.md"))]
    assert listed == sorted(used)


#: The package's commands, each of which has a section of its name.
COMMANDS = (
    "purge_idempotency",
    "recover_idempotency",
    "relay_outbox",
    "erase_idempotency",
    "idempotency_stats",
    "idempotency_audit",
)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_of_a_command_exists(command: str) -> None:
    texts = [text for name in PAGES for text in blocks(name, "sh", "text", "ini")]
    lines = [line for text in texts for line in text.splitlines() if f" {command}" in line]
    parser = load_command_class("idempotency", command).create_parser("manage.py", command)
    for line in lines:
        parser.parse_args(shlex.split(line.partition(f" {command}")[2]))
    assert lines, "no page shows it"


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_of_a_command_is_listed(name: str) -> None:
    options = options_of(load_command_class("idempotency", name)) - options_of(BaseCommand())
    cells = [code(row[0]) for row in table(section("reference/commands.md", f"`{name}`"))]
    assert {cell.split()[0] for cell in cells if cell and cell.startswith("--")} == options


def options_of(command: BaseCommand) -> set[str]:
    return set(re.findall(r"--[a-z-]+", command.create_parser("manage.py", "command").format_usage()))


def test_every_fault_of_the_provider_is_listed() -> None:
    rows = table(section("reference/sample-project.md", "The sample project's payouts"))
    assert [name for row in rows if len(row) == 2 and (name := code(row[0]))] == list(FAULTS)


@pytest.mark.parametrize(("heading", "act", "rows"), [("payouts", PAYOUTS, 7), ("orders", ORDERS, 5)])
def test_every_row_of_the_demo_that_is_explained_is_shown(heading: str, act: Act, rows: int) -> None:
    cells = [row[0] for row in table(section("reference/sample-project.md", f"The sample project's {heading}"))]
    explained = [cell for cell in cells if not cell.startswith("`")]
    assert len(explained) == rows
    shown = {row.label for row in act.rows}
    assert [name for cell in explained for name in cell.split("; ") if name not in shown] == []


def test_the_indexes_are_named_as_they_are() -> None:
    named = {name for page in PAGES for name in re.findall(r"`(idempotency_record_\w+)`", text_of(page))}
    assert named == {index.name for index in IdempotencyRecord._meta.indexes}
