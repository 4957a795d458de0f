"""``python -m tools.evidence``: generate the tables of runs in the documentation from their recorded results.

The results are the lines of ``tools/evidence/results.jsonl``. With ``RESULTS=tools/evidence``, each run of a test or
tool appends a line, even if it fails. Only the latest line of a run counts, or every line if the run draws random
cases. A line is older than the code if its ``judged`` differs from the digest of the current files.

A run without cases is an error, and so is a line without a command or the digest of a commit's files. So is a failed
run without ``became``, the explanation that a maintainer adds.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable
from functools import cache, partial
from pathlib import Path
from typing import Any

from tests.results import digest_of, subject_of
from tools.reports import markdown

ROOT = Path(__file__).resolve().parents[2]
#: The pages that have tables of runs.
PAGES = ("explanation/evidence", "explanation/costs", "reference/databases")
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
    *("kind", "pgbouncer", "seeds", "package", "store", "bug", "method", "server", "title"),
)
#: The figures that count violations. A run has those that it measures.
MEASURED = ("violations", "lost", "torn", "reconcile_doubled", "park_doubled")


def kind_of(line: Line) -> str:
    return str(line["what"]).partition(":")[0]


@cache
def digest(subject: str) -> str:
    return digest_of(subject)


def is_older(line: Line) -> bool:
    """Whether the files that decided the run have changed. Read after ``compare_digests``."""
    return bool(line["older"])


def compare_digests(lines: list[Line], *, with_files: bool) -> None:
    """Set ``older`` in each line.

    :param with_files: compare with the current files, instead of with the newest run of the same subject.
    """
    newest = {subject_of(line): line["judged"] for line in lines}
    for line in lines:
        expected = digest(subject_of(line)) if with_files else newest[subject_of(line)]
        line["older"] = line["judged"] != expected


def lines_of(text: str) -> list[Line]:
    """:raises ValueError: a run is void, can't be repeated, or failed without an explanation."""
    lines: list[Line] = [json.loads(line) for line in text.splitlines()]
    for line in lines:
        if not line.get("judged") or not line.get("command") or line["commit"].endswith("+"):
            raise ValueError(f"not a run of a commit that its command repeats: {line}")
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


def _table(heads: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    return markdown(heads, made) if (made := [list(row) for row in rows]) else "No run so far."


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
    return _table(["promise", "fault", "cases", "violations", "run"], rows)


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
    return f"{named}{', **older**' if any(map(is_older, lines)) else ''}, {max(line['date'] for line in lines)}"


def failures(lines: list[Line]) -> str:
    """The failed runs. Those with one failure and explanation share a row."""
    failed: dict[tuple[str, ...], list[Line]] = {}
    for line in lines:
        if line.get("failed"):
            failed.setdefault((line["what"], line["failed"], line["became"]), []).append(line)
    rows = [[what, _origin(group), *reasons] for (what, *reasons), group in failed.items()]
    return markdown(["kind", "run", "failure", "explanation"], rows) if rows else "None so far."


def methods(lines: list[Line]) -> str:
    """How many planted bugs each method detects, and how many no other method does."""
    from tools.methods import METHODS, SEEN

    tried = latest(lines, "method")
    found: dict[str, dict[str, str]] = {}
    for line in tried:
        found.setdefault(line["bug"], {})[line["method"]] = line["verdict"]
    rows: list[tuple[str, str, int, str]] = []
    for method in METHODS:
        verdicts = [by_method for by_method in found.values() if method in by_method]
        seen = [by_method for by_method in verdicts if by_method[method] == SEEN]
        alone = [len(by_method) == len(METHODS) and [*by_method.values()].count(SEEN) == 1 for by_method in seen]
        origin = _origin([line for line in tried if line["method"] == method]) if verdicts else "–"
        rows.append((method, f"{len(seen)} of {len(verdicts)}", sum(alone), origin))
    idle = [row[0] for row in rows if not row[2]]
    table = _table(["method", "bugs detected", "only by this method", "run"], rows)
    return table + (f"\n\nThese detected no bug that the others missed: {', '.join(idle)}." if idle else "")


def failovers(lines: list[Line]) -> str:
    rows = []
    for line in latest(lines, "failover"):
        calls = [f"{line[f'{name}_doubled']} of {line[name]}" for name in ("reconcile", "park")]
        lost = f"{line['lost']} of {line['rows']}"
        rows.append([line["what"].partition(": ")[2], lost, line["torn"], *calls, _origin([line])])
    return _table(["setting", "rows lost", "torn", "Reconcile: doubled", "PARK: doubled", "run"], rows)


def _grouped(lines: list[Line], *names: str) -> Iterable[list[Line]]:
    """Groups of lines with the same values, either all older or all current."""
    groups: dict[tuple[object, ...], list[Line]] = {}
    for line in lines:
        groups.setdefault((is_older(line), *(line.get(name, "–") for name in names)), []).append(line)
    return groups.values()


def _sums(lines: list[Line], names: Iterable[str]) -> list[str]:
    """The sums of the figures, or a dash if some runs did not measure one."""
    return [f"{sum(line[name] for line in lines):,}" if all(name in line for line in lines) else "–" for name in names]


def deliveries(lines: list[Line]) -> str:
    """The totals of all faults for each broker."""
    rows = []
    for group in _grouped(latest(lines, "deliveries"), "server", "broker"):
        sums = _sums(group, ("fired", "messages", "deliveries", "violations", "sent_again"))
        control = [sum(line["control"][column] for line in group) for column in range(3)]
        rows.append([group[0].get("server", "–"), group[0]["broker"], *sums, *control, _origin(group)])
    heads = ["database", "broker", "struck", "messages", "deliveries", "violations", "sent again"]
    return _table([*heads, "control: doubled", "lost", "rolled back", "run"], rows)


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
    return _table(heads, rows)


def controls(lines: list[Line]) -> str:
    rows = []
    for group in _grouped([line for line in lines if line["what"] == "stops: control"]):
        lost = " of ".join(_sums(group, ("lost", "rows")))
        calls = [" of ".join(_sums(group, (f"{name}_doubled", name))) for name in ("reconcile", "park")]
        rows.append([lost, *calls, _origin(group)])
    return _table(["rows lost", "Reconcile: doubled", "PARK: doubled", "run"], rows)


def conformance(lines: list[Line]) -> str:
    """This package first, then durable packages, then those in memory. Packages with equal verdicts share a row."""
    found = latest(lines, "conformance")
    found.sort(
        key=lambda line: (line["version"] != "this checkout", line["store"].startswith("memory"), line["package"])
    )
    verdicts = ("**no**", "deviates", "–")
    if unknown := {verdict for line in found for verdict in line["cells"].values()} - {"yes", *verdicts}:
        raise ValueError(f"verdicts without a column: {unknown}")
    rows: dict[tuple[str, ...], list[Line]] = {}
    for line in found:
        cells = [", ".join(name for name, verdict in line["cells"].items() if verdict == each) for each in verdicts]
        rows.setdefault((line["store"], *cells), []).append(line)
    heads = ["package and version", "records in", "no", "deviates", "not judged", "run"]
    named = [
        [", ".join(f"{line['package']} {line['version']}" for line in group), *row, _origin(group)]
        for row, group in rows.items()
    ]
    return f"{_table(heads, named)}\n\nThe cases: {', '.join(found[0]['cells']) if found else '–'}."


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
    return _table(heads, rows)


def databases(lines: list[Line]) -> str:
    """The tests, crash cells and deliveries that passed on each server. A dash stands for no run."""
    groups: dict[str, dict[str, list[Line]]] = {}
    for kind in ("tests", "matrix", "deliveries"):
        for line in latest(lines, kind):
            pooled = ", PgBouncer" if line.get("pgbouncer") else ""
            groups.setdefault(f"{_server(line)}{pooled}", {}).setdefault(kind, []).append(line)
    rows = []
    for server, kinds in sorted(groups.items()):
        passed = [
            f"{total(line[figure] for line in kinds[kind]):,}" if kind in kinds else "–"
            for kind, figure, total in (
                ("tests", "passed", max),
                ("matrix", "cells", sum),
                ("deliveries", "messages", sum),
            )
        ]
        rows.append([server, *passed, _origin([line for group in kinds.values() for line in group])])
    return _table(["database", "tests", "crash cells", "messages", "run"], rows)


def _server(line: Line) -> str:
    """The server with its version, or the database of a line that was recorded without it."""
    database = line.get("database", "postgres")  # deliveries need PostgreSQL
    return str(line.get("server", {"postgres": "PostgreSQL", "sqlite": "SQLite"}.get(database, database)))


#: The tables of the page of costs: the benchmark's table, and its columns.
COSTS = {
    "cost of a first execution": ("First execution", (0, 1, 3, 6, 7, 9, 10)),
    "cost of a replay": ("Replay", (0, 1, 3, 6, 10)),
    "cost over a network": ("First execution over a network", (0, 1, 3, 7, 9)),
    "cost of replays over a network": ("Replay over a network", (0, 1, 3, 7, 9)),
    "cost of duplicates": ("50 duplicates at once", (0, 1, 2, 3, 4)),
    "cost of a purge": ("Purge", (0, 1, 2)),
}


def costs(name: str, lines: list[Line]) -> str:
    title, columns = COSTS[name]
    found = [line for line in latest(lines, "costs") if line["title"].partition(" of ")[0] == title]
    if not found:
        return "No run so far."
    line = found[-1]
    heads, *rows = [[row[column] for column in columns] for row in (line["headings"], *line["cells"])]
    return f"{markdown(heads, rows)}\n\n{_origin([line])}: `{line['command']}`"


#: The function that generates each block of a page.
BLOCKS = {
    **{name: partial(costs, name) for name in COSTS},
    "databases": databases,
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
    return re.sub(
        r"<!-- (.+?) -->.*?<!-- end -->",
        lambda block: f"<!-- {block[1]} -->\n{BLOCKS[block[1]](lines)}\n<!-- end -->",
        text,
        flags=re.DOTALL,
    )


def path_of(name: str) -> Path:
    return ROOT / f"docs/{name}.md"


def main() -> int:
    for name in PAGES:
        path_of(name).write_text(page(path_of(name).read_text(encoding="utf-8")), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
