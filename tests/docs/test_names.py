"""Every name and number in the documentation exists in the code, and the lists are complete."""

import ast
import inspect
import json
import pkgutil
import re
import runpy
import shlex
import unittest
from dataclasses import fields
from datetime import timedelta

import pytest
from django.contrib.auth.models import Permission
from django.core.management import load_command_class
from django.core.management.base import BaseCommand
from django.dispatch import Signal
from django.urls import Resolver404, path, resolve

import idempotency
from idempotency import exceptions, lifecycle, log, signals, testing
from idempotency.contrib.opentelemetry import tracing
from idempotency.contrib.prometheus import exporter as metrics
from idempotency.http.problems import PROFILES, problem
from idempotency.management import commands
from idempotency.models import IdempotencyRecord
from idempotency.operate.statistics import Precision, Stats
from idempotency.options.table import OPTIONS, SETTINGS, Use
from idempotency.options.values import DEFAULT_MAX_ATTEMPTS
from idempotency.outbox.management import commands as outbox_commands
from idempotency.protocol.recovery import LONGEST_BACKOFF
from idempotency.testing.checks import CHECKS
from idempotency.views.route_audit import Verdict
from testproject.provider.faults import FAULTS
from tests.docs.pages import DOCS, PAGES, ROOT, blocks, code, each_page, section, table, text_of

pytestmark = pytest.mark.once


def test_every_signal_is_listed_with_its_arguments():
    rows = {code(row[0]): row for row in table(text_of("reference/signals.md")) if len(row) == 3}
    sent = {name for name, value in vars(signals).items() if isinstance(value, Signal)}
    assert set(rows) == sent
    assert {name: code(row[1]) for name, row in rows.items() if code(row[1])} == {
        "claimed": "request_hash",
        "taken_over": "request_hash",
        "recovered": "status",
        "purged": "count",
        "relayed": "count",
    }


def test_every_number_of_the_statistics_is_listed():
    page = "reference/metrics.md"
    listed = [name for row in table(section(page, "The numbers")) for name in re.findall(r"`(\w+)`", row[0])]
    assert sorted(listed) == sorted(field.name for field in fields(Stats))
    kinds = [code(row[0]) for row in table(section(page, "How far a number can be trusted"))]
    assert kinds == [str(kind) for kind in Precision]


def test_the_table_of_attempts_and_times_matches_the_code():
    """An abandoned first attempt is reconciled as attempt 2. Each Unknown waits 2 ** attempt seconds."""
    rows = [row for row in table(section("how-to/choose-recovery.md", "The contract")) if len(row) == 2]
    units = {"minutes": 60, "hour": 3600, "day": 86_400}
    for attempts, written in rows:
        number, unit = written.split()
        waits = sum(min(2**attempt, LONGEST_BACKOFF) for attempt in range(2, int(attempts.split(",")[0])))
        assert waits == pytest.approx(int(number) * units[unit], rel=0.1), attempts
    assert rows[0][0] == f"{DEFAULT_MAX_ATTEMPTS}, the default"


#: An option: its names, its type, its default and, indented, its meaning. Only the page has types and meanings.
OPTION = re.compile(r"^(`.+`)\n: .+; default `(.+)`\n\n(?:  .+\n)+", re.MULTILINE)


def test_the_list_of_settings_matches_the_declaration():
    declared = {option.name: option for option in (*OPTIONS.values(), *SETTINGS.values())}
    words = {"timedelta": timedelta, "CONFLICT": idempotency.CONFLICT, "REEXECUTE": idempotency.REEXECUTE}
    listed = [
        (re.findall(r"`(\w+)`", term), default)
        for term, default in OPTION.findall(between("reference/settings.md", "settings"))
    ]
    assert sorted(names[-1].lower() for names, _ in listed) == sorted(declared)
    for names, default in listed:
        option = declared[names[-1].lower()]
        assert names == [option.setting] * bool(option.setting) + [option.name] * (option.name in OPTIONS)
        assert eval(default, words) == option.default, option.name


def test_the_settings_page_lists_the_options_that_blocks_and_tasks_refuse():
    [item] = re.findall(r"^- `claim\(\)` and (?:.+\n)(?:  .+\n)+", text_of("reference/settings.md"), re.MULTILINE)
    of_both, of_tasks = item.split("Tasks also refuse")
    for part, uses in ((of_both, {Use.BLOCK, Use.TASK}), (of_tasks, {Use.TASK})):
        refused = {name for name, option in OPTIONS.items() if uses == set(Use) - set(option.applies_to)}
        assert {name for name in re.findall(r"`(\w+)`", part) if name in OPTIONS} == refused


def errors():
    return [
        member
        for _, member in inspect.getmembers(exceptions, inspect.isclass)
        if issubclass(member, exceptions.IdempotencyError)
    ]


def test_the_wire_contract_lists_every_answer_and_each_code_has_a_remedy():
    rows = {code(row[2]): row[1] for row in table(section("reference/wire.md", "Answers"))}
    answers = {error.code: str(error.status_code) for error in errors() if "title" in vars(error)}
    del answers[exceptions.IdempotencyError.code]
    assert {code(row[0]) for row in table(between("how-to/troubleshoot.md", "codes"))} == set(answers)
    del answers[exceptions.LeaseLostError.code]  # over HTTP, the winner's record answers instead
    assert {answer: status for answer, status in rows.items() if answer} == answers


@each_page()
def test_a_pages_imports_are_in_the_reference(name):
    reference = text_of("reference/api.md")
    imported = {
        found.name
        for source in blocks(name, "python")
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "idempotency"
        for found in node.names
    }
    assert {missing for missing in imported if not re.search(rf"\b{missing}\b", reference)} == set()


def between(name, mark):
    _, _, text = text_of(name).partition(f"<!-- {mark} -->")
    return text.partition(f"<!-- end of {mark} -->")[0]


def test_every_message_with_a_remedy_is_in_the_code():
    trees = [ast.parse(path.read_text()) for path in sorted((ROOT / "idempotency").rglob("*.py"))]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    texts = [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    written = re.sub("%[a-z]", "", "\n".join(texts))
    rows = table(between("how-to/troubleshoot.md", "messages"))
    messages = [code(row[0]) or "" for row in rows]
    assert all(messages)
    assert len(messages) > 5
    assert [part for message in messages for part in message.split("…") if part.strip(" :") not in written] == []


def test_the_problems_on_the_page_are_those_in_the_code():
    by_code = {error.code: error for error in errors()}
    shown = [
        json.loads(line)
        for block in blocks("reference/wire.md", "http")
        for line in block.splitlines()
        if line.startswith('{"type"')
    ]
    assert len(shown) >= 2
    for body in shown:
        error = by_code[body["code"]](body["detail"], retry_after=2 if body["retryable"] else None)
        assert body == problem(error, PROFILES["ietf"])


def test_each_problem_has_its_heading_on_the_page_of_its_type(settings):
    page = "https://docs.example.com/problems.html"
    settings.IDEMPOTENCY = {"PROBLEM_DOCS": page}
    problems = [error() for error in errors() if "title" in vars(error) and error is not exceptions.IdempotencyError]
    types = [problem(error, PROFILES["ietf"])["type"].partition("#") for error in problems]
    assert {before for before, _, _ in types} == {page}
    assert sorted(place for _, _, place in types) == sorted(
        re.findall(r"^### ([a-z-]+)$", text_of("reference/wire.md"), re.MULTILINE)
    )


def test_every_public_name_is_in_the_reference():
    reference = text_of("reference/api.md")
    spellings = {name: (f":: idempotency.{name}\n", f"`{name}`") for name in idempotency.__all__}
    assert [name for name, either in spellings.items() if not any(text in reference for text in either)] == []
    assert [error.__name__ for error in errors() if f".. autoexception:: {error.__name__}\n" not in reference] == []
    names = re.findall(r"\.\. auto(?:function|class):: (idempotency[\w.]*)", text_of("reference/api.md"))
    assert len(names) >= 40
    assert [name for name in names if not _exists(name)] == []


#: Read as text, because Celery may not be installed.
TASKS = (ROOT / "idempotency/contrib/celery/tasks.py").read_text()
PROVIDER_OPTIONS = {*re.findall(r'"(--[a-z-]+)"', (ROOT / "testproject/provider/__main__.py").read_text())}


def is_endpoint(path):
    try:
        return bool(resolve(path))
    except Resolver404:
        return False


#: Loggers, and OpenTelemetry's names: span attributes, span events and metrics.
LOGGED_AND_TRACED = {"idempotency.audit", log.EVENTS, tracing.OPERATION, tracing.ATTEMPT, tracing.RESULT} | {
    f"idempotency.{name.removeprefix('idempotency_')}"
    for name in (*signals.EVENTS, metrics.EVENTS, *metrics.COUNTS, *metrics.GAUGES)
}


def is_dotted_name(name):
    """Whether the name is a check, a permission, a logger, a trace's name, or resolves to an attribute of a module."""
    if re.search(r"\.[EW]\d{3}$", name) or name in LOGGED_AND_TRACED:
        return True
    return Permission.objects.filter(codename=name.rpartition(".")[2]).exists() or _exists(name)


#: Kinds of names on pages: the pattern that finds them, and whether such a name exists.
NAMED = {
    "task of a schedule": (r'"task": "([\w.]+)"', lambda name: f"def {name.rpartition('.')[2]}(" in TASKS),
    "endpoint of the sample": (r"`(?:[A-Z]+ )?(/[a-z/]+/)`", is_endpoint),
    "endpoint of the tutorial": (r"http://127\.0\.0\.1:8000(/[a-z/]+/)", is_endpoint),
    "options of the provider": (
        r"python -m testproject\.provider(.*)",
        lambda options: set(re.findall(r"--[a-z-]+", options)) <= PROVIDER_OPTIONS,
    ),
    "file": (r"`((?:idempotency|testproject|docs)/[\w/-]+\.\w+)`", lambda file: (ROOT / file).exists()),
    "dotted name": (r"`(idempotency(?:_outbox|_dashboard)?(?:\.\w+)+)", is_dotted_name),
}


@pytest.mark.django_db
@each_page()
def test_every_name_on_a_page_exists(name):
    for what, (pattern, exists) in NAMED.items():
        missing = [named for named in re.findall(pattern, text_of(name)) if not exists(named)]
        assert missing == [], what
    links = [link for link in re.findall(r"\]\(([^)#\s]+)", text_of(name)) if "://" not in link]
    assert [link for link in links if not (PAGES[name].parent / link).exists()] == []


def test_every_pattern_finds_a_match():
    everything = "\n".join(map(text_of, PAGES))
    assert [what for what, (pattern, _) in NAMED.items() if not re.search(pattern, everything)] == []


def _exists(name):
    try:
        pkgutil.resolve_name(name)
    except (AttributeError, ImportError):
        return False
    return True


def test_every_system_check_is_listed():
    sources = [path.read_text() for path in sorted((ROOT / "idempotency").rglob("*.py"))]
    used = set(re.findall(r'"(idempotency\.[EW]\d{3})"', "".join(sources)))
    listed = [code(row[0]) for row in table(text_of("reference/checks.md")) if row[0]]
    assert sorted(listed) == sorted(used)


#: The package's commands. Each has a section with its name.
COMMANDS = {
    module.name: app
    for app, package in (("idempotency", commands), ("idempotency.outbox", outbox_commands))
    for module in pkgutil.iter_modules(package.__path__)
}


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_of_a_command_exists_and_is_listed(name):
    texts = [text for page in PAGES for text in blocks(page, "sh", "text", "ini")]
    lines = [line for text in texts for line in text.replace("\\\n", "").splitlines() if f" {name}" in line]
    command = load_command_class(COMMANDS[name], name)
    for line in lines:
        arguments = line.partition(f" {name}")[2].partition("|")[0]
        command.create_parser("manage.py", name).parse_args(shlex.split(arguments))
    assert lines, "no page shows it"
    cells = [code(row[0]) for row in table(section("reference/commands.md", f"`{name}`"))]
    listed = {cell.split()[0] for cell in cells if cell and cell.startswith("--")}
    assert listed == options_of(command) - options_of(BaseCommand())


def options_of(command):
    return set(re.findall(r"--[a-z-]+", command.create_parser("manage.py", "command").format_usage()))


def test_every_fault_of_the_provider_is_listed():
    rows = table(section("testproject/README.md", "Payouts"))
    assert [name for row in rows if len(row) == 2 and (name := code(row[0]))] == list(FAULTS)


def test_the_pages_name_the_indexes_of_the_model():
    named = {name for page in PAGES for name in re.findall(r"`(idempotency_record_\w+)`", text_of(page))}
    assert named == {index.name for index in IdempotencyRecord._meta.indexes}


# The diagrams match their sources


PICTURES = DOCS / "pictures"


def test_the_diagram_of_states_matches_the_declaration():
    drawn = re.findall(r"<title>(\w+)&#45;&gt;(\w+)</title>", (PICTURES / "states.svg").read_text())
    declared = re.findall(r"^(\w+) +-> (\w+)", lifecycle.__doc__ or "", re.MULTILINE)
    assert len(declared) == 8
    assert sorted(drawn) == sorted([*declared, ("completed", "absent"), ("recoverable", "absent")])


def test_the_sequence_diagrams_match_their_steps():
    pictures = runpy.run_path(str(PICTURES / "draw.py"))["from_text"]()
    assert {name: (PICTURES / name).read_text() for name in pictures} == pictures


# The page about testing: its tests pass, and its tables are complete


TESTING = "how-to/test-protected-views.md"


@pytest.mark.django_db(transaction=True)
def test_the_tests_of_the_page_pass(run_page, settings):
    view = run_page("how-to/protect-a-view.md")["create_transfer"]
    settings.ROOT_URLCONF = (path("transfers/", view),)
    page = run_page(TESTING)
    result = unittest.TestResult()
    for case in ("TransferTests", "TransferStateTests"):
        unittest.defaultTestLoader.loadTestsFromTestCase(page[case]).run(result)
    assert (result.testsRun, result.errors, result.failures) == (2, [], [])


def test_every_check_and_every_helper_is_listed():
    rows = table(section(TESTING, "Repeat a request in every way"))
    assert sorted(code(row[0]) or "" for row in rows) == sorted(CHECKS)
    helpers = [code(row[0]) or "" for row in table(section(TESTING, "Start from a state of the record"))]
    assert len({helper.partition("(")[0] for helper in helpers} & set(testing.__all__)) == len(helpers) == 4


def test_every_verdict_of_the_audit_is_explained():
    rows = table(section(TESTING, "Audit a project"))
    assert [code(row[0]) for row in rows] == [str(verdict) for verdict in Verdict]
