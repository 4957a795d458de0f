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

#: For each kind of run: the promise, the fault, and the figure of its cases.
RUNS: dict[str, tuple[str, str, str]] = {
    "matrix": (
        "one effect and one answer per key; a late attempt changes nothing",
        "[each fault at each place](#the-crash-matrix)",
        "cells",
    ),
    "orders": (
        "the same",
        "every order of two actors' steps",
        "orders",
    ),
    "walks": (
        "the same",
        "random orders of three actors' steps",
        "orders",
    ),
    "sequences": (
        "each function behaves as documented",
        "random calls, compared with a model in memory",
        "calls",
    ),
    "model": (
        "every key ends completed, recoverable or parked",
        "all histories of a [model](#what-isnt-proven)",
        "states",
    ),
    "stops": (
        "an acknowledged outcome is kept",
        "immediate stops of PostgreSQL under load",
        "operations",
    ),
    "cuts": (
        "the same",
        "[power cuts](#histories) under load",
        "operations",
    ),
    "failover": (
        "the same, with a synchronous standby",
        "[a failover](#failover)",
        "operations",
    ),
    "deliveries": (
        "one effect per message",
        "[15 faults](#deliveries) of workers, relays and brokers",
        "messages",
    ),
    "soak": (
        "one effect per operation under load, none lost",
        "[kills, stops and freezes](#soak) of all servers",
        "requests",
    ),
    "fuzz": (
        "no error that unprotected code doesn't have",
        "random requests, answers, messages, forms, settings",
        "inputs",
    ),
    "guided": (
        "keys, JSON and forms are parsed as other parsers do",
        "coverage-guided bytes",
        "inputs",
    ),
}
#: The kinds of runs that try other cases each time, so that all of them count.
DRAWN = {"walks", "fuzz", "soak"}
#: Those that are to go wrong, or are shown elsewhere, and count for no promise.
CONTROLS = {"stops: control", "failover: asynchronous", "failover: local"}
#: What tells two runs of another kind apart.
APART = (
    *("what", "database", "level", "declaration", "before", "options", "handler", "point", "fault", "broker"),
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
    for kind, (promise, fault, figure) in RUNS.items():
        counted = [line for line in latest(lines, kind) if line["what"] not in CONTROLS]
        for older in (False, True):
            if group := [line for line in counted if is_older(line) is older]:
                failed = [line for line in lines if line.get("failed") and kind_of(line) == kind]
                violations = _violations([*group, *(each for each in failed if is_older(each) is older)])
                cases = _databases(group) + _cases(group, figure)
                rows.append([promise, fault, cases, violations, _origin(group)])
    return markdown(["promise", "fault", "cases", "violations", "run"], rows)


def _cases(lines: list[Line], figure: str) -> str:
    """How many cases there were, and in how many the fault struck, if all of the runs have measured that."""
    cases = f"{sum(line[figure] for line in lines):,} {figure}"
    if not all("fired" in line for line in lines):
        return cases
    return f"{cases}, {sum(line['fired'] for line in lines):,} struck"


def _violations(lines: list[Line]) -> str:
    found = [[line[name] for name in MEASURED if name in line] for line in lines]
    return str(sum(map(sum, found))) if all(found) else "–"


def _databases(lines: list[Line]) -> str:
    names = {
        "postgresql" if line["database"] == "postgres" else line["database"] for line in lines if "database" in line
    }
    names |= {line["broker"] for line in lines if "broker" in line}
    return f"{', '.join(sorted(names))}: " if names else ""


def _origin(lines: list[Line]) -> str:
    """The commits, marked where the code has changed since, and the last date."""
    commits = sorted({f"`{line['commit'][:7]}`" for line in lines})
    named = ", ".join(commits) if len(commits) < 4 else f"{len(commits)} commits"
    return f"{named}{', **older**' if is_older(lines[0]) else ''}, {max(line['date'] for line in lines)}"


def failures(lines: list[Line]) -> str:
    failed = [line for line in lines if line.get("failed")]
    rows = [[line["what"], _origin([line]), line["failed"], line["became"]] for line in failed]
    return markdown(["kind", "run", "what failed", "what became of it"], rows) if rows else "None so far."


def methods(lines: list[Line]) -> str:
    """How many of the planted bugs each method has seen, and how many it alone."""
    from tools.methods import METHODS, SEEN

    found: dict[str, dict[str, str]] = {}
    for line in latest(lines, "method"):
        found.setdefault(line["bug"], {})[line["method"]] = line["verdict"]
    rows = []
    for method in METHODS:
        tried = [verdicts for verdicts in found.values() if method in verdicts]
        seen = [verdicts for verdicts in tried if verdicts[method] == SEEN]
        whole = [verdicts for verdicts in seen if len(verdicts) == len(METHODS)]
        alone = [[*verdicts.values()].count(SEEN) == 1 for verdicts in whole]
        rows.append([method, f"{len(seen)} of {len(tried)}", sum(alone)])
    return markdown(["method", "bugs seen", "by no other method"], rows)


def failovers(lines: list[Line]) -> str:
    rows = []
    for line in latest(lines, "failover"):
        calls = [f"{line[f'{name}_doubled']} of {line[name]}" for name in ("reconcile", "park")]
        lost = f"{line['lost']} of {line['rows']}"
        rows.append([line["what"].partition(": ")[2], lost, line["torn"], *calls, _origin([line])])
    return markdown(["setting", "rows lost", "torn", "Reconcile: doubled", "PARK: doubled", "run"], rows)


def _grouped(lines: list[Line], *names: str) -> Iterable[list[Line]]:
    """The lines that agree in these values and in being older or not."""
    groups: dict[tuple[object, ...], list[Line]] = {}
    for line in lines:
        groups.setdefault((is_older(line), *(line[name] for name in names)), []).append(line)
    return groups.values()


def _sums(lines: list[Line], names: Iterable[str]) -> list[str]:
    """A dash where not all of the runs have measured it."""
    return [f"{sum(line[name] for line in lines):,}" if all(name in line for line in lines) else "–" for name in names]


def deliveries(lines: list[Line]) -> str:
    """The figures of all faults together, for each broker."""
    rows = []
    for group in _grouped(latest(lines, "deliveries"), "broker"):
        sums = _sums(group, ("fired", "messages", "deliveries", "violations", "sent_again"))
        control = [sum(line["control"][column] for line in group) for column in range(3)]
        rows.append([group[0]["broker"], *sums, *control, _origin(group)])
    heads = ["broker", "struck", "messages", "deliveries", "violations", "sent again"]
    return markdown([*heads, "control: doubled", "lost", "rolled back", "run"], rows)


def soaks(lines: list[Line]) -> str:
    names = ("operations", "fired", "take_overs", "ambiguous", "sent_again")
    rows = [
        [
            *_sums(group, names),
            " of ".join(_sums(group, ("doubled", "controls"))),
            *_sums(group, ("histories", "invocations", "unexplained")),
            _origin(group),
        ]
        for group in _grouped(latest(lines, "soak"))
    ]
    heads = ["operations", "faults", "take-overs", "ambiguous", "sent again", "control: doubled"]
    heads += ["histories", "calls", "control: unexplained", "run"]
    return markdown(heads, rows)


def controls(lines: list[Line]) -> str:
    rows = []
    for group in _grouped([line for line in lines if line["what"] == "stops: control"]):
        lost = " of ".join(_sums(group, ("lost", "rows")))
        calls = [" of ".join(_sums(group, (f"{name}_doubled", name))) for name in ("reconcile", "park")]
        rows.append([lost, *calls, _origin(group)])
    return markdown(["rows lost", "Reconcile: doubled", "PARK: doubled", "run"], rows)


def conformance(lines: list[Line]) -> str:
    """Ours comes first, then the packages that are durable, then those in memory. Equals share a row."""
    found = latest(lines, "conformance")
    found.sort(
        key=lambda line: (line["version"] != "this checkout", line["store"].startswith("memory"), line["package"])
    )
    ours = found[0]
    verdicts = ("**no**", "deviates", "–")
    if unknown := {verdict for line in found for verdict in line["cells"].values()} - {"yes", *verdicts}:
        raise ValueError(f"verdicts without a column: {unknown}")
    rows: dict[tuple[str, ...], list[str]] = {}
    for line in found:
        named = [", ".join(name for name, verdict in line["cells"].items() if verdict == each) for each in verdicts]
        rows.setdefault((line["store"], *named), []).append(f"{line['package']} {line['version']}")
    heads = ["package and version", "records in", "no", "deviates", "not judged"]
    made = markdown(heads, [[", ".join(packages), *row] for row, packages in rows.items()])
    return f"{made}\n\nThis package was judged at {_origin([ours])}. The cases are {', '.join(ours['cells'])}."


def mutants(lines: list[Line]) -> str:
    """What was tried, and how many of them no test has seen.

    :raises ValueError: a run is void.
    """
    rows = []
    for group in _grouped(latest(lines, "mutation"), "database", "commit"):
        mutants, of, killed, explained, survived = (
            sum(line[name] for line in group) for name in ("mutants", "of", "killed", "explained", "survived")
        )
        if not all(line["killed"] for line in group):
            raise ValueError(f"a void run: {group}")
        folders = ", ".join(sorted(f"`{line['kind'].removeprefix('idempotency/')}`" for line in group))
        score = f"{100 * killed / (mutants - explained):.1f} %"
        tried = f"{mutants:,} of {of:,}"
        rows.append([folders, group[0]["database"], tried, killed, explained, survived, score, _origin(group)])
    heads = ["below `idempotency/`", "database", "mutants", "killed", "explained", "survived", "score", "run"]
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
