"""``python -m tools.mutation``: which mutants of the rooms that decide about a second effect do the tests see?

The mutants are those of mutmut (``pip install mutmut``), of decorated functions, too. pytest collects the tests once,
and a fork of it notes the lines that each test executes. Each mutant gets a fork in which its functions have its code,
or a new process if only an import would run that. Tests of its line run there, fastest first, until one fails.

``mutation.toml`` lists mutants that no test need see. The exit code is 1 if another one survives. It is 2 if tests fail
without a mutant, or if a planted fault is not seen.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import gc
import json
import math
import os
import random
import signal
import subprocess
import sys
import time
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import CodeType, FunctionType, SimpleNamespace
from typing import Any

import libcst
import pytest
from _pytest.runner import runtestprotocol
from libcst.metadata import MetadataWrapper, PositionProvider
from mutmut.mutation.file_mutation import MutationVisitor
from mutmut.mutation.mutators import mutation_operators
from mutmut.mutation.pragma_handling import IgnoredCode

from tests.results import note
from tools.mutants import copies, write

LIST = Path(__file__).with_suffix(".toml")
ROOMS = ("idempotency/protocol", "idempotency/store", "idempotency/http")
LEFT_OUT = ("citus.py", "mysql.py")
TESTS = ("tests/unit", "tests/http", "tests/database", "tests/concurrency")
SLOW = ("tests/database/test_stateful.py", "tests/http/test_fuzz.py", "tests/database/counters")
IMPORTS, NO_DIFFERENCE, LATE = "import", "no difference", "the time limit"
PYTEST = ("-p", "no:randomly", "-p", "no:cacheprovider")


@dataclass(frozen=True)
class Mutant:
    file: str
    number: int
    line: int
    old: str
    new: str

    @property
    def diff(self) -> list[str]:
        lines = difflib.unified_diff(self.old.splitlines(), self.new.splitlines(), lineterm="", n=0)
        return [line for line in lines if not line.startswith(("---", "+++", "@@"))]

    @property
    def excuse(self) -> str:
        """Why no test need see it, according to the list."""
        gone, come = ("\n".join(line for line in self.diff if line[0] == sign) for sign in "-+")
        for entry in tomllib.loads(LIST.read_text())["mutant"]:
            if entry["file"] in self.file and entry["old"] in gone and entry.get("new", "") in come:
                return str(entry["why"])
        return ""


class Everywhere(MutationVisitor):
    """mutmut leaves decorated functions out, because it copies functions."""

    def _skip_node_and_children(self, node: libcst.CSTNode) -> bool:
        return not isinstance(node, libcst.FunctionDef) and bool(super()._skip_node_and_children(node))


@cache
def mutations(file: str) -> tuple[MetadataWrapper, list[Any]]:
    wrapper = MetadataWrapper(libcst.parse_module(Path(file).read_text()))
    visitor = Everywhere(mutation_operators, IgnoredCode(set(), set(), set()))
    wrapper.visit(visitor)
    return wrapper, visitor.mutations


def make(file: str, number: int) -> Mutant:
    wrapper, found = mutations(file)
    node = found[number].original_node
    line = wrapper.resolve(PositionProvider)[node].start.line
    new = wrapper.module.deep_replace(node, found[number].mutated_node)
    return Mutant(file, number, line, wrapper.module.code, new.code)


def planted() -> Iterator[Mutant]:
    """A fault in a function, one that only an import sees, and none."""
    file = "idempotency/protocol/ownership.py"
    text = Path(file).read_text()
    line = next(node for node in ast.parse(text).body if getattr(node, "name", "") == "complete").body[-1].lineno
    lines = text.splitlines(keepends=True)
    broken = [*lines[: line - 1], "    raise ArithmeticError\n", *lines[line - 1 :]]
    for number, new in enumerate(["".join(broken), f"{text}complete = None\n", f"{text}harmless = None\n"]):
        yield Mutant(file, number, line, text, new)


def essence(code: CodeType) -> tuple[Any, ...]:
    """All of a code object but its lines and columns."""
    constants = tuple(essence(each) if isinstance(each, CodeType) else repr(each) for each in code.co_consts)
    return code.co_code, constants, code.co_names, code.co_varnames, code.co_freevars, code.co_exceptiontable


def differences(old: CodeType, new: CodeType, *, imported: bool = True) -> Iterator[tuple[CodeType, CodeType] | str]:
    """The functions that differ, and those inside of them, or ``IMPORTS``."""
    inner = [[each for each in code.co_consts if isinstance(each, CodeType)] for code in (old, new)]
    if imported:
        rest = [
            code.replace(co_consts=tuple(each for each in code.co_consts if not isinstance(each, CodeType)))
            for code in (old, new)
        ]
        if len(inner[0]) != len(inner[1]) or essence(rest[0]) != essence(rest[1]):
            yield IMPORTS
    for before, after in zip(*inner, strict=False):
        if essence(before) != essence(after):
            is_class = imported and "__module__" in before.co_names and "__qualname__" in before.co_names
            if not is_class:
                yield before, after
            yield from differences(before, after, imported=is_class)


class Zygote:
    """A plugin of pytest, which forks instead of running what it has collected."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.result = 2
        self.functions: dict[tuple[str, int, str], list[FunctionType]] = defaultdict(list)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        from django.db import connections

        self.items = {item.nodeid: item for item in session.items}
        self.next: Any = SimpleNamespace(listchain=lambda: [session])  # keeps the fixtures of the session
        first = next(name for name, item in self.items.items() if item.get_closest_marker("django_db"))
        self.error_of(first)  # makes the database
        connections.close_all()
        for each in gc.get_objects():
            if isinstance(each, FunctionType):
                code = each.__code__
                self.functions[code.co_filename, code.co_firstlineno, code.co_qualname].append(each)
        if not self.options.seen.exists():
            print("the lines of the tests:", self.fork(list(self.items), None, 7200), flush=True)
        self.lines, self.seconds, failed = json.loads(self.options.seen.read_text())
        gc.freeze()  # the forks share it
        for error in failed:
            print(f"left out, because it fails without a mutant: {error}", flush=True)
            self.items.pop(error.partition(": ")[0], None)
        if len(failed) < len(self.items) / 100:
            self.result = try_mutants(self, self.options)
        return True

    def tests_of(self, mutant: Mutant) -> list[str]:
        """The tests that execute its line, or else its statement, its function, its file."""
        lines = self.lines.get(mutant.file, {})
        spans = [
            range(node.lineno, (node.end_lineno or 0) + 1)
            for node in ast.walk(ast.parse(mutant.old))
            if isinstance(node, ast.stmt) and node.lineno <= mutant.line <= (node.end_lineno or 0)
        ]
        for span in [[mutant.line], *sorted(spans, key=len), map(int, lines)]:
            if found := {test for line in span for test in lines.get(str(line), []) if test in self.items}:
                break
        rank, seconds, by_file, chosen = {}, 0.0, Counter[str](), []
        for test in sorted(found, key=self.seconds.__getitem__):  # the fastest of each file, then their second ones
            by_file[file := test.partition("::")[0]] += 1
            rank[test] = by_file[file]
        for test in sorted(rank, key=rank.__getitem__):
            if (seconds := seconds + self.seconds[test]) > self.options.seconds:
                break
            chosen.append(test)
        return chosen

    def killer(self, mutant: Mutant) -> str:
        """The test that sees it, or ``""``."""
        path = Path(mutant.file).resolve()
        tests = self.tests_of(mutant)
        limit = 30 + 8 * sum(self.seconds[test] for test in tests)
        differing = list(
            differences(*(compile(text, path, "exec", dont_inherit=True) for text in (mutant.old, mutant.new)))
        )
        if not differing:
            return NO_DIFFERENCE
        write(path, mutant.new)  # for processes that tests start, too
        try:
            if IMPORTS not in differing:
                return self.fork(tests, differing, limit)
            command = [sys.executable, "-m", "pytest", "-qx", "--reuse-db", *PYTEST, *tests]
            ran = subprocess.run(command, capture_output=True, text=True, timeout=limit, start_new_session=True)
            return (ran.returncode and ran.stdout.strip().splitlines()[-2]) or ""
        except subprocess.TimeoutExpired:
            return LATE
        finally:
            write(path, mutant.old)

    def fork(self, tests: list[str], differing: Any, limit: float) -> str:
        """What a fork says of tests: which one fails with the functions of a mutant or, without any, a summary."""
        said = Path("said")
        said.unlink(missing_ok=True)
        if not (child := os.fork()):
            try:
                os.setsid()
                for number in range(3):
                    os.dup2(os.open(os.devnull, os.O_RDWR), number)
                said.write_text(self.trace(tests) if differing is None else self.first_error(tests, differing))
            finally:
                os._exit(0)
        end = time.monotonic() + limit
        while not (ended := os.waitpid(child, os.WNOHANG)[0]) and time.monotonic() < end:
            time.sleep(0.005)
        with suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
        if not ended:
            os.waitpid(child, 0)
            return LATE
        return said.read_text() if said.exists() else "the process ended"

    def error_of(self, test: str) -> str:
        reports = runtestprotocol(self.items[test], nextitem=self.next, log=False)
        return next((f"{test}: {str(report.longrepr)[-500:]}" for report in reports if report.failed), "")

    def first_error(self, tests: list[str], differing: list[tuple[CodeType, CodeType]]) -> str:
        for old, new in differing:
            for function in self.functions[old.co_filename, old.co_firstlineno, old.co_qualname]:
                function.__code__ = new
        return next(filter(None, map(self.error_of, tests)), "").partition(": ")[0]

    def trace(self, tests: list[str]) -> str:
        import coverage

        traced = coverage.Coverage(data_file=None, config_file=False, include=[f"{Path.cwd()}/idempotency/*"])
        seconds, failed = {}, []
        with traced.collect():
            for test in tests:
                traced.switch_context(test)
                begun = time.monotonic()
                failed += filter(None, [self.error_of(test)])
                seconds[test] = time.monotonic() - begun
        data = traced.get_data()
        lines = {os.path.relpath(file): data.contexts_by_lineno(file) for file in data.measured_files()}
        self.options.seen.write_text(json.dumps([lines, seconds, failed]))
        return f"{len(tests)} tests"


def try_mutants(zygote: Zygote, options: argparse.Namespace) -> int:
    for each in planted():
        killer = zygote.killer(each)
        print(f"planted: {killer or 'not seen'}", flush=True)
        if bool(killer) is (each.number == 2):
            return 2
    files = sorted({str(file) for path in options.paths for file in [Path(path), *Path(path).rglob("*.py")]})
    there = [
        (file, number)
        for file in files
        if file.endswith(".py") and not file.endswith(LEFT_OUT)
        for number in range(len(mutations(file)[1]))
    ]
    chosen = [tuple(one.split("#")) for one in options.only] or there
    if not options.all and not options.only:
        chosen = random.Random(options.seed).sample(there, min(options.sample, len(there)))
    killed = survived = 0
    for count, (file, number) in enumerate(chosen, 1):
        each = make(file, int(number))
        excuse = each.excuse
        killer = excuse or zygote.killer(each)
        print(f"{count}/{len(chosen)} {file}:{each.line}#{number}: {killer or 'SURVIVED'}", flush=True)
        if not killer:
            print(*each.diff, sep="\n", flush=True)
        if not excuse and killer != NO_DIFFERENCE:
            killed, survived = killed + bool(killer), survived + (not killer)
    tried = killed + survived
    share, half = killed / (tried or 1), 1.96 * math.sqrt(killed * survived / (tried or 1) ** 3)
    print(
        f"seed {options.seed}: {len(chosen)} of {len(there)} mutants, {tried} of them not listed: {killed} killed, "
        f"{survived} survived, {100 * share:.1f} % ± {100 * half:.1f}"
    )
    note("mutation", database=options.database, mutants=tried, fired=killed, seed=options.seed)
    return 1 if survived or not tried else 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.mutation", description=__doc__)
    parser.add_argument("paths", nargs="*", default=ROOMS, help="files or folders")
    parser.add_argument("--sample", type=int, default=300)
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--only", action="append", default=[], metavar="FILE#NUMBER")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument("--database", choices=["sqlite", "postgres"], default="sqlite")
    parser.add_argument("--seconds", type=float, default=60, help="how long the tests of one mutant take without it")
    parser.add_argument("--seen", type=Path, default=Path("seen"), help="keep the lines of the tests in this file")
    options = parser.parse_args()
    if "MUTATION" not in os.environ:
        with copies(1) as free:  # the tree itself is never changed
            copy = free.get()
            repository = subprocess.run(["git", "rev-parse", "--absolute-git-dir"], capture_output=True, text=True)
            environment = {
                **os.environ,
                "PYTHONPATH": str(copy),
                "MUTATION": "a copy",
                "GIT_DIR": repository.stdout.strip(),
            }
            if "RESULTS" in environment:
                environment["RESULTS"] = str(Path(environment["RESULTS"]).resolve())
            command = [sys.executable, "-m", "tools.mutation", *sys.argv[1:], f"--seed={options.seed}"]
            return subprocess.run(command, cwd=copy, env=environment, check=False).returncode
    zygote = Zygote(options)
    ignored = [f"--ignore={path}" for path in SLOW]
    pytest.main(["-q", "-s", *PYTEST, f"--database={options.database}", *TESTS, *ignored], plugins=[zygote])
    return zygote.result


if __name__ == "__main__":
    sys.exit(main())
