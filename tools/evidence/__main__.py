"""``python -m tools.evidence``: generate the tables of docs/explanation/evidence.md from recorded results.

The results are the lines of ``tools/evidence/results.jsonl``. With ``RESULTS=tools/evidence``, each run of a test or
tool appends a line, even if it fails. Only the latest line of a run counts, or every line if the run draws random
cases. A line is older than the code if its ``judged`` differs from the digest of the current files.

A run without cases is an error. So is a failed run without ``became``, the explanation that a maintainer adds.
``--check`` writes nothing, and exits with 1 if the page is out of date.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

from tests.results import judged
from tools.reports import markdown

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/explanation/evidence.md"
RESULTS = Path(__file__).with_name("results.jsonl")

Line = dict[str, Any]

#: For each kind of run: the promise, the fault, and the figure that counts its cases.
RUNS: dict[str, tuple[str, str, str]] = {
    "matrix": (
        "one effect and one answer per key; a late attempt changes nothing",
        "[each fault at each point](#the-crash-matrix)",
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
        "random calls, compared with an in-memory model",
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
        "no error that unprotected code wouldn't raise",
        "random requests, messages, forms, settings",
        "inputs",
    ),
    "guided": (
        "keys, JSON and forms are parsed as by other parsers",
        "coverage-guided bytes",
        "inputs",
    ),
}
#: The kinds of runs that draw random cases, so that every run counts.
DRAWN = {"walks", "fuzz", "soak"}
#: Runs that must fail, or that another table shows. They support no promise.
CONTROLS = {"stops: control", "failover: asynchronous", "failover: local"}
#: The fields that identify a run of another kind.
APART = (
    *("what", "database", "level", "declaration", "before", "options", "handler", "point", "fault", "broker"),
    *("kind", "pgbouncer", "seeds", "package", "store", "bug", "method"),
)
#: The figures that count violations. A run has those that it measures.
MEASURED = ("violations", "lost", "torn", "reconcile_doubled", "park_doubled")


def kind_of(line: Line) -> str:
    return str(line["what"]).partition(":")[0]


@cache
def digest(kind: str, folder: str | None) -> str:
    return judged(kind, folder)


def is_older(line: Line) -> bool:
    """Whether the files that the run judged have changed, or are unknown. Read after ``compare_digests``."""
    return bool(line["older"])


def compare_digests(lines: list[Line], *, with_files: bool) -> None:
    """Set ``older`` in each line.

    :param with_files: compare with the current files, instead of with the newest run of each kind.
    """
    newest = {_judging(line): line.get("judged") for line in lines}
    for line in lines:
        expected = digest(*_judging(line)) if with_files else newest[_judging(line)]
        line["older"] = line.get("judged") is None or line["judged"] != expected


def _judging(line: Line) -> tuple[str, str | None]:
    """The kind of the run, and the folder if it judges only one."""
    kind = kind_of(line)
    return kind, line["kind"] if kind == "mutation" else None


def lines_of(text: str) -> list[Line]:
    """:raises ValueError: a run is void, or it failed without an explanation."""
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
    """The number of cases, and of those in which the fault struck, if all runs measured it."""
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
    """The commits, marked if the code has changed, and the last date."""
    commits = sorted({f"`{line['commit'][:7]}`" for line in lines})
    named = ", ".join(commits) if len(commits) < 4 else f"{len(commits)} commits"
    return f"{named}{', **older**' if is_older(lines[0]) else ''}, {max(line['date'] for line in lines)}"


def failures(lines: list[Line]) -> str:
    failed = [line for line in lines if line.get("failed")]
    rows = [[line["what"], _origin([line]), line["failed"], line["became"]] for line in failed]
    return markdown(["kind", "run", "failure", "explanation"], rows) if rows else "None so far."


def methods(lines: list[Line]) -> str:
    """How many planted bugs each method detects, and how many no other method does."""
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
    return markdown(["method", "bugs detected", "only by this method"], rows)


def failovers(lines: list[Line]) -> str:
    rows = []
    for line in latest(lines, "failover"):
        calls = [f"{line[f'{name}_doubled']} of {line[name]}" for name in ("reconcile", "park")]
        lost = f"{line['lost']} of {line['rows']}"
        rows.append([line["what"].partition(": ")[2], lost, line["torn"], *calls, _origin([line])])
    return markdown(["setting", "rows lost", "torn", "Reconcile: doubled", "PARK: doubled", "run"], rows)


def _grouped(lines: list[Line], *names: str) -> Iterable[list[Line]]:
    """Groups of lines with the same values, either all older or all current."""
    groups: dict[tuple[object, ...], list[Line]] = {}
    for line in lines:
        groups.setdefault((is_older(line), *(line[name] for name in names)), []).append(line)
    return groups.values()


def _sums(lines: list[Line], names: Iterable[str]) -> list[str]:
    """The sums of the figures, or a dash if some runs did not measure one."""
    return [f"{sum(line[name] for line in lines):,}" if all(name in line for line in lines) else "–" for name in names]


def deliveries(lines: list[Line]) -> str:
    """The totals of all faults for each broker."""
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
    """This package first, then durable packages, then those in memory. Packages with equal verdicts share a row."""
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
    """The numbers of mutants that were tried and that survived.

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


#: The function that generates each block of the page.
BLOCKS = {
    "runs": runs,
    "failed": failures,
    "mutants": mutants,
    "methods": methods,
    "conformance": conformance,
    "controls": controls,
    "deliveries": deliveries,
    "soaks": soaks,
    "failovers": failovers,
}


def page(text: str, *, with_files: bool = False) -> str:
    """The page with the tables of the recorded results.

    :param with_files: compare the runs with the current files.
    """
    lines = lines_of(RESULTS.read_text(encoding="utf-8"))
    compare_digests(lines, with_files=with_files)
    for name, make in BLOCKS.items():
        block = f"<!-- {name} -->\n{make(lines)}\n<!-- end -->"
        text, count = re.subn(rf"<!-- {name} -->.*?<!-- end -->", lambda _, made=block: made, text, flags=re.DOTALL)
        if count != 1:
            raise ValueError(f"the page has {count} places for {name}")
    return text


def main() -> int:
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
