"""``python -m tools.evidence``: write the tables of docs/explanation/evidence.md that are made of results.

The results are lines of ``tools/evidence/results.jsonl``. Each run of a test or tool of the method adds its own with
``RESULTS=tools/evidence``. The latest line of a run counts, and each one of a run that draws other cases every time. A
run of no cases, or with a violation, is refused.
``--check`` writes nothing, and exits with 1 if the page is not as the results have it.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import django

from tools.reports import markdown

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/explanation/evidence.md"
RESULTS = Path(__file__).with_name("results.jsonl")

#: For each kind of run: the promise, the fault, the figures of its cases, and the command.
RUNS: dict[str, tuple[str, str, str, str]] = {
    "orders": (
        "one effect for a key; a late attempt changes nothing",
        "orders of two actors' steps",
        "orders",
        "python -m pytest tests/orders -k two --count 0",
    ),
    "walks": ("the same", "random orders of three", "orders", "python -m pytest tests/orders -k three --count 100000"),
    "sequences": (
        "each function does what its documentation says",
        "random sequences of calls, compared with a model in memory",
        "calls",
        "python -m pytest tests/database/test_stateful.py --count 1000",
    ),
    "calls": (
        "nothing doubled, nothing lost",
        "SIGKILL at a system call",
        "kills",
        "python -m pytest tests/crash/test_calls.py --count 1",
    ),
    "model": (
        "every key ends completed, recoverable or parked",
        "all histories of a model",
        "states",
        "python -m pytest tests/model",
    ),
    "matrix": ("one effect for a key", "each fault at each place", "cells", "python -m tools.crashes --all --seeds 2"),
    "soak": (
        "one effect for an operation, none lost, under load",
        "kills, stops and freezes of all servers",
        "requests",
        "python -m tools.soak --requests 1000000",
    ),
    "fuzz": (
        "no error that the unprotected view, client or task doesn't give",
        "random requests, answers, messages, forms and settings",
        "inputs",
        "python -m pytest tests/http tests/contrib -k fuzz --count 100000",
    ),
    "guided": (
        "keys, JSON and forms mean what others read in them",
        "bytes that coverage guides, to the parsers",
        "inputs",
        "python -m tests.unit.test_guided -runs=1000000",
    ),
}
#: The kinds of runs that try other cases each time, so that all of them count.
DRAWN = {"walks", "fuzz"}
#: What tells two runs of another kind apart.
APART = (
    *("what", "database", "level", "job", "declaration", "before", "options", "handler"),
    *("kind", "pgbouncer", "seeds", "package", "store"),
)


def latest(text: str, kind: str) -> list[dict[str, Any]]:
    lines = [line for line in map(json.loads, text.splitlines()) if line["what"].partition(":")[0] == kind]
    if kind in DRAWN:
        return lines
    return list({tuple(str(line.get(name)) for name in APART): line for line in lines}.values())


def results(text: str) -> Iterator[list[dict[str, Any]]]:
    """The latest runs of each kind, in the order of ``RUNS``.

    :raises ValueError: a run is void.
    """
    for kind, (*_, figure, _) in RUNS.items():
        lines = latest(text, kind)
        for line in lines:
            if not line[figure] or line.get("violations", 0) or line.get("fired", 1) == 0:
                raise ValueError(f"a void run: {line}")
        yield lines


def runs() -> str:
    rows = []
    text = RESULTS.read_text(encoding="utf-8")
    for (promise, fault, figure, command), lines in zip(RUNS.values(), results(text), strict=True):
        if lines:
            fired = sum(line.get("fired", line[figure]) for line in lines)
            databases = ", ".join(sorted({line["database"] for line in lines if "database" in line})) or "none"
            dates = max(line["date"] for line in lines)
            cases = f"{sum(line[figure] for line in lines):,} {figure}"
            rows.append([promise, fault, databases, cases, f"{fired:,}", "0", f"`{command}`", dates])
    return markdown(["promise", "fault", "database", "cases", "fired", "violations", "in full", "run on"], rows)


def conformance() -> str:
    """Ours comes first, and has nothing but a yes.

    :raises ValueError: it has something else.
    """
    lines = latest(RESULTS.read_text(encoding="utf-8"), "conformance")
    # Ours, then those that are durable, then those in memory.
    lines.sort(key=lambda line: (line["version"] != "this checkout", line["store"] == "memory", line["package"]))
    ours = lines[0]
    if ours["version"] != "this checkout" or set(ours["cells"].values()) != {"yes"}:
        raise ValueError(f"a finding of our own: {ours}")
    rows = [
        [f"{line['package']} ({line['store']})", line["version"], *line["cells"].values(), line["date"]]
        for line in lines
    ]
    return markdown(["package (records in)", "version", *ours["cells"], "run on"], rows)


def mutants() -> str:
    """What was tried, and how many of them no test has seen.

    :raises ValueError: a run is void.
    """
    rows = []
    for line in latest(RESULTS.read_text(encoding="utf-8"), "mutation"):
        if not line["killed"]:
            raise ValueError(f"a void run: {line}")
        tried = f"{line['mutants']:,} of {line['of']:,}"
        score = f"{100 * line['killed'] / (line['mutants'] - line['explained']):.1f} %"
        counts = [line[name] for name in ("killed", "explained", "survived")]
        rows.append(
            [f"`{line['kind']}`", line["database"], tried, *counts, score, f"`{line['command']}`", line["date"]]
        )
    heads = ["folder", "database", "mutants", "killed", "explained", "survived", "score", "command", "run on"]
    return markdown(heads, rows)


def redundant() -> str:
    from tests.model.test_model import REDUNDANT

    return ", ".join(f"`{guard}`" for guard in REDUNDANT)


def page(text: str) -> str:
    for name, make in {"runs": runs, "mutants": mutants, "redundant": redundant, "conformance": conformance}.items():
        block = f"<!-- {name} -->\n{make()}\n<!-- end -->"
        text, count = re.subn(rf"<!-- {name} -->.*?<!-- end -->", lambda _, made=block: made, text, flags=re.DOTALL)
        if count != 1:
            raise ValueError(f"the page has {count} places for {name}")
    return text


def main() -> int:
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "testproject.settings")
    django.setup()
    before = PAGE.read_text(encoding="utf-8")
    after = page(before)
    if "--check" in sys.argv:
        return int(before != after)
    PAGE.write_text(after, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
