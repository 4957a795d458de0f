"""``python -m tools.evidence``: write the tables of docs/explanation/evidence.md that are made of results.

The results are lines of ``tools/evidence/results.jsonl``. Each run of a test or tool of the method adds its own with
``RESULTS=tools/evidence``, also if it fails. The latest line of a run counts, and each one of a run that draws other
cases every time. A line whose ``judged`` is not the digest of the files as they are is older than them.

A run of no cases is refused. So is one that has ``failed`` and doesn't say what ``became`` of that, which people add.
``--check`` writes nothing, and exits with 1 if the page is not as the results have it.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import django

from tests.results import judged
from tools.reports import markdown

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/explanation/evidence.md"
RESULTS = Path(__file__).with_name("results.jsonl")

Line = dict[str, Any]

#: For each kind of run: the promise, the fault, the figures of its cases, and the command.
RUNS: dict[str, tuple[str, str, str, str]] = {
    "matrix": (
        "one effect for a key, and the same answer for all; a late attempt changes nothing",
        "[each fault at each place](#the-crash-matrix)",
        "cells",
        "python -m tools.crashes --all --seeds 2",
    ),
    "orders": (
        "the same",
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
        "all histories of a model whose clients send one request each and retry none",
        "states",
        "python -m pytest tests/model",
    ),
    "stops": (
        "an acknowledged outcome is kept",
        "immediate stops of PostgreSQL under load",
        "operations",
        "python -m tools.crashes --restarts 50",
    ),
    "cuts": (
        "the same",
        "power cuts that lose what PostgreSQL has not synced, under load",
        "operations",
        "python -m pytest tests/crash/test_power_cut.py",
    ),
    "failover": (
        "the same over a failover, with a synchronous standby",
        "the primary killed behind a broken network, [a standby promoted](#failover)",
        "operations",
        "python -m tools.crashes --failover",
    ),
    "deliveries": (
        "one effect for a message",
        "[15 faults](#deliveries) of workers, relays and brokers",
        "messages",
        "python -m tools.deliveries --messages 2000",
    ),
    "soak": (
        "one effect for an operation, none lost, under load",
        "[kills, stops and freezes](#soak) of all servers",
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
DRAWN = {"walks", "fuzz", "soak"}
#: Those that are to go wrong, or are shown elsewhere, and count for no promise.
CONTROLS = {"stops: control", "failover: asynchronous", "failover: local"}
#: What tells two runs of another kind apart.
APART = (
    *("what", "database", "level", "job", "declaration", "before", "options", "handler", "point", "fault", "broker"),
    *("kind", "pgbouncer", "seeds", "package", "store", "bug", "method"),
)
#: The figures of failures of a promise, of which a run has those that it measures.
MEASURED = ("violations", "lost", "torn", "reconcile_doubled", "park_doubled")


def kind_of(line: Line) -> str:
    return str(line["what"]).partition(":")[0]


@cache
def digest(kind: str, folder: str | None) -> str:
    return judged(kind, folder)


def is_older(line: Line) -> bool:
    """Whether what the run has judged has changed since, as far as is known."""
    kind = kind_of(line)
    return bool(line.get("judged") != digest(kind, line["kind"] if kind == "mutation" else None))


def lines_of(text: str) -> list[Line]:
    """:raises ValueError: a run is void, or it failed and nothing says what became of that."""
    lines: list[Line] = [json.loads(line) for line in text.splitlines()]
    for line in lines:
        if line.get("failed"):
            if not line.get("became"):
                raise ValueError(f"what became of this failure? {line}")
            continue
        figure = RUNS[kind_of(line)][2] if kind_of(line) in RUNS else "what"
        if not line.get(figure) or line.get("fired", 1) == 0 or line.get("violations"):
            raise ValueError(f"a void run: {line}")
    return lines


def latest(lines: Iterable[Line], kind: str) -> list[Line]:
    """The runs of a kind that count."""
    found = [line for line in lines if kind_of(line) == kind and not line.get("failed")]
    if kind in DRAWN:
        return found
    return list({tuple(str(line.get(name)) for name in APART): line for line in found}.values())


def runs(lines: list[Line]) -> str:
    rows = []
    for kind, (promise, fault, figure, command) in RUNS.items():
        counted = [line for line in latest(lines, kind) if line["what"] not in CONTROLS]
        for older in (False, True):
            if group := [line for line in counted if is_older(line) is older]:
                cases = f"{sum(line[figure] for line in group):,} {figure}"
                failed = [line for line in lines if line.get("failed") and kind_of(line) == kind]
                found = [
                    _sum(group, "fired"),
                    _violations([*group, *(each for each in failed if is_older(each) is older)]),
                ]
                rows.append([promise, fault, _databases(group), cases, *found, *_origin(group), f"`{command}`"])
    heads = ["promise", "fault", "database", "cases", "fired", "violations", "commits", "run on", "in full"]
    return markdown(heads, rows)


def _sum(lines: list[Line], figure: str) -> str:
    """The sum of what each of the runs has measured."""
    return f"{sum(line[figure] for line in lines):,}" if all(figure in line for line in lines) else "–"


def _violations(lines: list[Line]) -> str:
    found = [[line[name] for name in MEASURED if name in line] for line in lines]
    return str(sum(map(sum, found))) if all(found) else "–"


def _databases(lines: list[Line]) -> str:
    names = {
        "postgresql" if line["database"] == "postgres" else line["database"] for line in lines if "database" in line
    }
    return ", ".join(sorted(names | {line["broker"] for line in lines if "broker" in line})) or "none"


def _origin(lines: list[Line]) -> list[str]:
    """The commits, marked where the code has changed since, and the last date."""
    commits = sorted({f"`{line['commit'][:7]}`" for line in lines})
    named = ", ".join(commits) if len(commits) < 4 else f"{len(commits)} commits"
    return [f"{named}, **older**" if is_older(lines[0]) else named, max(line["date"] for line in lines)]


def failures(lines: list[Line]) -> str:
    failed = [line for line in lines if line.get("failed")]
    rows = [[line["date"], line["what"], f"`{line['commit'][:7]}`", line["failed"], line["became"]] for line in failed]
    return markdown(["date", "run", "commit", "what failed", "what became of it"], rows) if rows else "None so far."


def methods(lines: list[Line]) -> str:
    """Which method has seen which planted bug, and how many each has seen, alone and in all."""
    from tools.methods import METHODS, SEEN

    found: dict[str, dict[str, str]] = {}
    for line in latest(lines, "method"):
        found.setdefault(line["bug"], {})[line["method"]] = line["verdict"]
    rows = [[bug, *(verdicts.get(method, "") for method in METHODS)] for bug, verdicts in sorted(found.items())]
    seen = {method: [bug for bug, verdicts in found.items() if verdicts.get(method) == SEEN] for method in METHODS}
    tried = {method: sum(method in verdicts for verdicts in found.values()) for method in METHODS}
    rows.append(["**seen, of those tried**", *(f"{len(bugs)} of {tried[method]}" for method, bugs in seen.items())])
    whole = [bug for bug, verdicts in found.items() if len(verdicts) == len(METHODS)]
    alone = {
        method: sum(bug in whole and list(found[bug].values()).count(SEEN) == 1 for bug in bugs)
        for method, bugs in seen.items()
    }
    rows.append(["**seen by this method alone**", *map(str, alone.values())])
    return markdown(["bug", *METHODS], rows)


def failovers(lines: list[Line]) -> str:
    rows = []
    for line in latest(lines, "failover"):
        calls = [f"{line[name]}, {line[f'{name}_doubled']}" for name in ("reconcile", "park")]
        rows.append(
            [line["what"].partition(": ")[2], line["rows"], line["lost"], line["torn"], *calls, *_origin([line])]
        )
    heads = ["setting", "acknowledged rows", "lost", "torn", "Reconcile: calls, doubled", "PARK: calls, doubled"]
    return markdown([*heads, "commit", "run on"], rows)


def deliveries(lines: list[Line]) -> str:
    rows = []
    for line in latest(lines, "deliveries"):
        counts = [line["messages"], line["deliveries"], line["violations"], line["sent_again"]]
        rows.append([line["fault"], line["broker"], line["fired"], *counts, *line["control"], *_origin([line])])
    heads = ["fault", "broker", "struck", "messages", "deliveries", "violations", "sent again"]
    control = ["control: doubled", "lost", "rolled back"]
    return markdown([*heads, *control, "commit", "run on"], rows)


def soaks(lines: list[Line]) -> str:
    names = (
        *("requests", "operations", "histories", "invocations", "fired"),
        *("take_overs", "ambiguous", "sent_again", "p50", "p99"),
    )
    rows = []
    for line in latest(lines, "soak"):
        control = f"{line['doubled']:,} of {line['controls']:,}"
        figures = (f"{line[name]:,}" if name in line else "–" for name in names)
        rows.append([line["seed"], *figures, control, *_origin([line])])
    return markdown(["seed", *names, "control: doubled", "commit", "run on"], rows)


def controls(lines: list[Line]) -> str:
    rows = []
    for line in lines:
        if line["what"] == "stops: control":
            calls, doubled = line["reconcile"] + line["park"], line["reconcile_doubled"] + line["park_doubled"]
            lost = f"{line['lost']} of {line['rows']} rows lost, {doubled} of {calls} calls doubled"
            rows.append(["stops, with `synchronous_commit = off`", lost, *_origin([line])])
    for line in latest(lines, "soak"):
        doubled = f"{line['doubled']:,} of {line['controls']:,} doubled"
        if "unexplained" in line:
            doubled += f", {line['unexplained']:,} with answers that no record explains"
        rows.append(["soak, without a claim", doubled, *_origin([line])])
    return markdown(["control", "what came of it", "commit", "run on"], rows)


def conformance(lines: list[Line]) -> str:
    """Ours comes first, with what all cases came to, whatever it is."""
    found = latest(lines, "conformance")
    # Ours, then those that are durable, then those in memory.
    found.sort(key=lambda line: (line["version"] != "this checkout", line["store"] == "memory", line["package"]))
    ours = found[0]
    rows = [
        [f"{line['package']} ({line['store']})", line["version"], *line["cells"].values(), line["date"]]
        for line in found
    ]
    made = markdown(["package (records in)", "version", *ours["cells"], "run on"], rows)
    commits = ", ".join(_origin([ours]))
    if "cases" not in ours:
        return f"{made}\n\nThe row of this package is of {commits}, and has these columns only."
    cases: dict[str, list[str]] = {}
    for name, verdict in ours["cases"].items():
        cases.setdefault(verdict, []).append(name)
    said = "; ".join(
        f"{verdict}: {', '.join(f'`{name}`' for name in names)}" for verdict, names in sorted(cases.items())
    )
    return f"{made}\n\nAll {len(ours['cases'])} cases of this package, {commits}: {said}."


def mutants(lines: list[Line]) -> str:
    """What was tried, and how many of them no test has seen.

    :raises ValueError: a run is void.
    """
    rows = []
    for line in latest(lines, "mutation"):
        if not line["killed"]:
            raise ValueError(f"a void run: {line}")
        tried = f"{line['mutants']:,} of {line['of']:,}"
        score = f"{100 * line['killed'] / (line['mutants'] - line['explained']):.1f} %"
        counts = [line[name] for name in ("killed", "explained", "survived")]
        rows.append(
            [f"`{line['kind']}`", line["database"], tried, *counts, score, *_origin([line]), f"`{line['command']}`"]
        )
    heads = ["folder", "database", "mutants", "killed", "explained", "survived", "score", "commit", "run on", "command"]
    return markdown(heads, rows)


def redundant(lines: list[Line]) -> str:
    from tests.model.test_model import REDUNDANT

    return ", ".join(f"`{guard}`" for guard in REDUNDANT)


#: By the name of its place in the page.
BLOCKS = {
    "runs": runs,
    "failed": failures,
    "mutants": mutants,
    "methods": methods,
    "redundant": redundant,
    "conformance": conformance,
    "controls": controls,
    "deliveries": deliveries,
    "soaks": soaks,
    "failovers": failovers,
}


def page(text: str) -> str:
    lines = lines_of(RESULTS.read_text(encoding="utf-8"))
    for name, make in BLOCKS.items():
        block = f"<!-- {name} -->\n{make(lines)}\n<!-- end -->"
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
