"""The judges of a run share nothing with the judged code except the tables."""

import ast

import pytest

from tests.harness.zygote import ROOT

JUDGES = [
    *(ROOT / f"tests/crash/{name}.py" for name in ("cells", "failover", "matrix", "observer", "points", "storms")),
    *(ROOT / f"tests/soak/{name}.py" for name in ("load", "nemesis", "servers")),
    *(ROOT / name for name in ("tests/orders/judge.py", "tests/model/moves.py", "tests/delivery/tally.py")),
    *(ROOT / f"tests/harness/{name}.py" for name in ("answers", "history")),
    *(ROOT / name for name in ("testproject/harness/effects.py", "tools/soak.py")),
]
TABLES = {"idempotency.models", "idempotency.outbox.models"}


def imported(path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            yield node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


@pytest.mark.parametrize("path", JUDGES, ids=lambda path: path.stem)
def test_a_judge_imports_only_tables_from_the_package(path):
    assert {name for name in imported(path) if name.partition(".")[0] == "idempotency"} <= TABLES
