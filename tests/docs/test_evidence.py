"""The pages' tables of runs match the recorded lines, and a changed file makes the runs that it decided older."""

import ast
import json
import subprocess

import pytest

from tests.docs.pages import text_of
from tests.model.test_model import REDUNDANT
from tests.results import ROOT, SUBJECTS, digest_of
from tools.evidence import __main__ as evidence

RUN = {"commit": "0123456789ab", "date": "2026-01-01", "command": "python -m pytest", "judged": "recorded"}
WALKS = RUN | {"what": "walks", "database": "sqlite", "orders": 1}


@pytest.mark.parametrize("page", evidence.PAGES)
def test_the_tables_match_the_results(page):
    text = evidence.path_of(page).read_text(encoding="utf-8")
    assert evidence.page(text) == text


def test_every_table_is_on_a_page():
    texts = [evidence.path_of(page).read_text(encoding="utf-8") for page in evidence.PAGES]
    assert {name: sum(text.count(f"<!-- {name} -->") for text in texts) for name in evidence.BLOCKS} == dict.fromkeys(
        evidence.BLOCKS, 1
    )


def test_every_line_names_a_commit_of_this_history():
    git = ["git", "-C", str(ROOT)]
    history = subprocess.run([*git, "rev-list", "HEAD"], capture_output=True, text=True, check=False).stdout.split()
    if not history:  # the sdist
        return
    known = {commit[:12] for commit in history}
    lines = [json.loads(line) for line in evidence.RESULTS.read_text(encoding="utf-8").splitlines()]
    assert {line["commit"] for line in lines} - known == set()


def test_the_page_names_the_guards_that_the_model_does_not_need():
    text = " ".join(text_of("explanation/evidence.md").split())
    assert f"removing these guards breaks no promise: {', '.join(f'`{guard}`' for guard in REDUNDANT)}." in text


@pytest.mark.parametrize(
    ("planted", "problem"),
    [
        *(({"orders": 0}, "void"), ({"violations": 1}, "void"), ({"fired": 0}, "void")),
        ({"failed": "P1: doubled"}, "what became"),
        *(({"judged": None}, "not a run"), ({"command": ""}, "not a run"), ({"commit": "0123456789ab+"}, "not a run")),
    ],
)
def test_a_void_or_unexplained_run_or_one_that_cannot_be_repeated_is_refused(planted, problem):
    assert evidence.lines_of(json.dumps(WALKS))
    with pytest.raises(ValueError, match=problem):
        evidence.lines_of(json.dumps(WALKS | planted))


def rows_of(*lines, with_files=False):
    lines = evidence.lines_of("\n".join(map(json.dumps, lines)))
    evidence.compare_digests(lines, with_files=with_files)
    return [[cell.strip() for cell in row.split("|")[3:-1]] for row in evidence.runs(lines).splitlines()[2:]]


def test_a_run_before_the_newest_is_older():
    failed = {"judged": "second", "violations": 1, "failed": "P1: doubled", "became": "It is corrected."}
    rows = rows_of(WALKS, WALKS | {"judged": "second", "violations": 0}, WALKS | failed)
    assert rows == [
        ["sqlite: 1 orders", "1", "`0123456`, 2026-01-01"],
        ["sqlite: 1 orders", "–", "`0123456`, **older**, 2026-01-01"],
    ]


def test_the_table_of_databases_names_each_database_and_no_run_is_a_dash():
    tests = RUN | {"what": "tests", "server": "PostgreSQL 17", "passed": 1200}
    cells = RUN | {"what": "matrix", "database": "sqlite", "cells": 5}
    messages = RUN | {"what": "deliveries", "broker": "redis", "messages": 3}
    lines = evidence.lines_of("\n".join(map(json.dumps, [tests, cells, messages, messages | {"broker": "rabbitmq"}])))
    evidence.compare_digests(lines, with_files=False)
    rows = [[cell.strip() for cell in row.split("|")[1:-2]] for row in evidence.databases(lines).splitlines()[2:]]
    assert rows == [
        ["PostgreSQL", "–", "–", "6"],
        ["PostgreSQL 17", "1,200", "–", "–"],
        ["SQLite", "–", "5", "–"],
    ]


#: Rooms that each run is known to pass, and files of its judge. The runs between ``...`` share their rooms.
CORE = ("lifecycle.py", "models.py", "protocol/acquisition.py", "protocol/ownership.py", "store/portable.py")
REQUEST = (*CORE, "http/handler.py", "http/exchange.py", "views/decorators.py", "identity/fingerprint.py", "outcome.py")
UPKEEP = ("operate/sweep.py", "operate/purge.py")
MESSAGE = (
    *CORE,
    "outbox/relay.py",
    "outbox/publishing.py",
    "contrib/celery/consuming.py",
    "contrib/celery/deliveries.py",
)
POSTGRESQL = ("store/postgresql/statements.py", "store/postgresql/merged.py")
PASSED = {
    "matrix": (
        *(*REQUEST, *UPKEEP, *POSTGRESQL, "contrib/rest_framework/adapter.py", "management/running.py"),
        *("tests/crash/judging.py", "tests/crash/observer.py", "tests/harness/zygote.py", "testproject/views.py"),
    ),
    "stops": (*REQUEST, *POSTGRESQL, "tests/crash/storms.py", "tests/harness/history.py", "tools/crashes.py"),
    "cuts": (*REQUEST, *POSTGRESQL, "tests/crash/test_power_cut.py", "tests/harness/disk.py"),
    "failover": (*REQUEST, *POSTGRESQL, "tests/crash/failover.py", "testproject/provider/ledger.py"),
    "orders": (*REQUEST, *UPKEEP, "outbox/relay.py", "operate/erasure.py", "tests/orders/judge.py"),
    "walks": (*REQUEST, *UPKEEP, "tests/orders/scheduler.py"),
    "sequences": (*CORE, *UPKEEP, "outbox/relay.py", "tests/database/test_stateful.py"),
    "model": ("lifecycle.py", "protocol/acquisition.py", "tests/model/protocol.pml", "tests/model/moves.py"),
    "deliveries": (*MESSAGE, "tests/delivery/tally.py", "tests/delivery/faults.py", "testproject/tasks.py"),
    "soak": (*REQUEST, *MESSAGE, *UPKEEP, "tests/soak/nemesis.py", "tests/harness/history.py", "tools/soak.py"),
    "fuzz": (*REQUEST, "admin/records.py", "contrib/celery/consuming.py", "conf.py", "tests/http/test_fuzz.py"),
    "guided": ("identity/parsing.py", "identity/keys.py", "tests/unit/test_guided.py"),
    "method": (*CORE, "tests/orders/judge.py", "tests/crash/judging.py", "tools/methods.py"),
    "tests": (*REQUEST, *MESSAGE, "admin/records.py", "checks.py", "tests/http/test_protocol.py"),
    "conformance": (*REQUEST, "tools/conformance/src/idempotency_key_conformance/cases.py"),
    "comparison": (
        "tools/conformance/src/idempotency_key_conformance/wire.py",
        *("tests/conformance/servers/operation.py", "tests/conformance/servers/express_server.js"),
    ),
    "costs": (*REQUEST, "tools/benchmarks/views.py"),
}


@pytest.mark.failure_102
@pytest.mark.parametrize("subject", SUBJECTS)
def test_a_digest_covers_each_room_that_a_run_passes(subject):
    covered = {file.relative_to(ROOT).as_posix() for file in SUBJECTS[subject].files()}
    assert [name for name in PASSED[subject] if covered.isdisjoint({name, f"idempotency/{name}"})] == []


@pytest.mark.failure_102
def test_a_changed_line_in_a_room_that_a_run_passes_makes_it_older(tmp_path):
    """And a line beside it leaves it as it is."""
    for name in ("lifecycle.py", "contrib/openapi.py"):
        (tmp_path / "idempotency" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "idempotency" / name).write_text("sound")
    line = WALKS | {"judged": digest_of("walks", tmp_path)}
    for name, is_older in (("contrib/openapi.py", False), ("lifecycle.py", True)):
        (tmp_path / "idempotency" / name).write_text("changed")
        lines = evidence.lines_of(json.dumps(line))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(evidence, "digest", lambda subject: digest_of(subject, tmp_path))
            evidence.compare_digests(lines, with_files=True)
        assert ("**older**" in evidence._origin(lines)) is is_older


#: What the harness uses to print and to record.
WRITING = {"tests/results.py", "tools/reports.py"}


def imports_of(file):
    """The files of this checkout that a module imports."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and not node.level:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        for name in names:
            path = ROOT / name.replace(".", "/")
            yield from (each for each in (path.with_suffix(".py"), path / "__init__.py") if each.exists())


@pytest.mark.parametrize("subject", sorted(set(SUBJECTS) - {"tests"}))  # which covers all files
def test_a_digest_covers_what_the_harness_imports(subject):
    files = set(SUBJECTS[subject].files())
    harness = [file for file in files if file.suffix == ".py" and ROOT / "idempotency" not in file.parents]
    missing = {each.relative_to(ROOT).as_posix() for file in harness for each in imports_of(file)} - WRITING
    missing -= {file.relative_to(ROOT).as_posix() for file in files}
    assert {name for name in missing if not name.endswith("__init__.py")} == set()
