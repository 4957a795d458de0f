"""``python -m tools.mutation``: test mutants of the packages in which a bug can cause a second effect.

mutmut (``pip install mutmut``) makes the mutants, here of decorated functions as well. pytest collects the tests once,
and a fork records which lines each test executes. Each mutant is tried in a fork that replaces the code of the changed
functions. There, the tests of its line run until one fails: first those that killed mutants of the same file, then
those that ``tests/README.md`` names for it, the fastest first, then others. Module-level statements, such as constants,
are executed again in the fork. A new process runs the tests instead if a statement can't be executed again, if a test
fails even when the unchanged statement is executed again, if no test detects a change of a class, or if no test
executes the line, because its function is only called during imports.

``mutation.toml`` lists mutants that no test needs to detect. The exit code is 1 if another one survives. It is 2 if
tests fail without a mutant, or if a planted bug is not detected.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import faulthandler
import gc
import inspect
import json
import math
import os
import random
import re
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
from itertools import zip_longest
from pathlib import Path
from types import CodeType, FunctionType, SimpleNamespace
from typing import Any

import libcst
import pytest
from _pytest.runner import runtestprotocol
from libcst.metadata import MetadataWrapper, ParentNodeProvider, PositionProvider
from mutmut.mutation.file_mutation import MutationVisitor
from mutmut.mutation.mutators import mutation_operators
from mutmut.mutation.pragma_handling import IgnoredCode

from tests.results import note
from tools.mutants import copies, write

LIST = Path(__file__).with_suffix(".toml")
PACKAGES = ("idempotency/protocol", "idempotency/store", "idempotency/http")
EXCLUDED = ("citus.py", "mysql.py")
#: Files that only matter on PostgreSQL, and those that its store replaces.
ONLY_POSTGRESQL = ("/postgresql/", "own_connection.py", "statement_timeout.py")
NOT_POSTGRESQL = ("portable.py",)
TESTS = ("tests/unit", "tests/http", "tests/database", "tests/concurrency")
MODULES = "tests/unit/test_public_names.py"  # checks the names in each module
SLOW = ("tests/database/test_stateful.py", "tests/http/test_fuzz.py")
IMPORTS, NO_DIFFERENCE, LATE = "import", "no difference", "the time limit"
PYTEST = ("-p", "no:randomly", "-p", "no:cacheprovider")


@dataclass(frozen=True)
class Mutant:
    file: str
    number: int
    line: int
    old: str
    new: str
    #: The calls, raises and assignments that contain it.
    around: tuple[str, ...] = ()
    #: Whether it changes a literal with a space in it.
    is_prose: bool = False

    @property
    def diff(self) -> list[str]:
        lines = difflib.unified_diff(self.old.splitlines(), self.new.splitlines(), lineterm="", n=0)
        return [line for line in lines if not line.startswith(("---", "+++", "@@"))]

    @property
    def excuse(self) -> str:
        """The reason why no test needs to detect it, from the list."""
        gone, come = ("\n".join(line for line in self.diff if line[0] == sign) for sign in "-+")
        for entry in excuses():
            if (
                entry.get("file", "") in self.file
                and re.search(entry.get("old", ""), gone)
                and re.search(entry.get("new", ""), come)
                and ("inside" not in entry or any(re.match(entry["inside"], code) for code in self.around))
                and (self.is_prose or not entry.get("prose"))
            ):
                return str(entry["why"])
        return ""


@cache
def excuses() -> list[dict[str, Any]]:
    return list(tomllib.loads(LIST.read_text())["mutant"])


class Everywhere(MutationVisitor):
    """Includes decorated functions, which mutmut skips because it copies functions."""

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
    span = wrapper.resolve(PositionProvider)[node]
    code = wrapper.module.code
    lines = code.splitlines(keepends=True)
    begin, end = (sum(map(len, lines[: at.line - 1])) + at.column for at in (span.start, span.end))
    if isinstance(node, libcst.BaseCompoundStatement):
        new = wrapper.module.deep_replace(node, found[number].mutated_node).code
    else:  # equivalent, and a hundred times as fast
        new = code[:begin] + wrapper.module.code_for_node(found[number].mutated_node) + code[end:]
    around, parents = [], wrapper.resolve(ParentNodeProvider)
    outer = node
    while outer in parents and not isinstance(outer, libcst.FunctionDef):
        if isinstance(outer, (libcst.Call, libcst.Raise, libcst.Assign)):
            around.append(wrapper.module.code_for_node(outer))
        outer = parents[outer]
    changed = [node]
    if isinstance(node, libcst.Call):
        changed = [
            each.value for each in node.args if all(each is not kept for kept in found[number].mutated_node.args)
        ]
    texts = [wrapper.module.code_for_node(each) for each in changed]
    is_prose = all(re.match(r"""\(?\s*f?["'].* """, text) for text in texts)
    return Mutant(file, number, span.start.line, code, new, tuple(around), is_prose)


def planted() -> Iterator[Mutant]:
    """A bug in a function, a bug that only an import executes, and a change without an effect."""
    file = "idempotency/protocol/ownership.py"
    text = Path(file).read_text()
    line = next(node for node in ast.parse(text).body if getattr(node, "name", "") == "complete").body[-1].lineno
    lines = text.splitlines(keepends=True)
    broken = [*lines[: line - 1], "    raise ArithmeticError\n", *lines[line - 1 :]]
    harmless = text.replace("MAX_REPORTED = 100", "MAX_REPORTED = int(100)")
    for number, new in enumerate(["".join(broken), f"{text}complete = None\n", harmless]):
        yield Mutant(file, number, line, text, new)


def essence(code: CodeType) -> tuple[Any, ...]:
    """A code object without its line and column numbers."""
    constants = tuple(essence(each) if isinstance(each, CodeType) else repr(each) for each in code.co_consts)
    return code.co_code, constants, code.co_names, code.co_varnames, code.co_freevars, code.co_exceptiontable


def differences(old: CodeType, new: CodeType, *, imported: bool = True) -> Iterator[tuple[CodeType, CodeType] | str]:
    """The functions that differ, nested ones included, and ``IMPORTS`` if module-level or class-level code differs."""
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
            is_class = imported and not before.co_flags & inspect.CO_OPTIMIZED
            if not is_class:
                yield before, after
            yield from differences(before, after, imported=is_class)


def changed_statements(path: Path, mutant: Mutant) -> list[ast.Module | None]:
    """The module's statements that differ, before and after, with later assignments that use their names.

    None for both if anything differs except assignments, functions and classes.
    """
    kinds = (ast.Assign, ast.AnnAssign, ast.FunctionDef, ast.ClassDef)
    bodies = [ast.parse(text, path).body for text in (mutant.old, mutant.new)]
    found, names = [], set()
    for pair in zip_longest(*bodies):
        differ = None in pair or ast.dump(pair[0]) != ast.dump(pair[1])
        if differ and not all(isinstance(each, kinds) for each in pair):
            return [None, None]
        used = [each for each in ast.walk(pair[1]) if isinstance(each, ast.Name)]
        if differ or (isinstance(pair[1], kinds[:2]) and names & {each.id for each in used}):
            found.append(pair)
            names |= {each.id for each in used if isinstance(each.ctx, ast.Store)}
            names.add(getattr(pair[1], "name", ""))
    modules = [ast.Module([*each], []) for each in zip(*found, strict=True)]
    for module in modules:
        module.path = path
    return modules


@cache
def tests_near(file: str) -> tuple[str, ...]:
    """The tests that tests/README.md names for a file of the package."""
    rows = [line.split("|")[1:3] for line in Path("tests/README.md").read_text().splitlines() if line.startswith("| `")]
    path = file.removeprefix("idempotency/")
    return tuple(
        test
        for files, tests in rows
        if any(path.startswith(each) for each in re.findall(r"`([\w/.]+)`", files))
        for test in tests.split("`")[1].split()
    )


def run_again(statements: ast.Module) -> None:
    """Execute a module's statements again, and update all modules that imported the changed names."""
    path = str(statements.path)
    module = next(each for each in list(sys.modules.values()) if getattr(each, "__file__", None) == path)
    before = dict(vars(module))
    exec(compile(statements, path, "exec", dont_inherit=True), vars(module))
    changed = {name: now for name, now in vars(module).items() if name in before and now is not before[name]}
    for each in list(sys.modules.values()):
        if str(getattr(each, "__file__", "")).startswith(str(Path.cwd())):
            for name, now in changed.items():
                if vars(each).get(name, module) is before[name]:
                    setattr(each, name, now)


class Zygote:
    """A pytest plugin that forks instead of running the collected tests."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.result = 2
        self.seconds: dict[str, float] = defaultdict(lambda: 1)
        self.functions: dict[tuple[str, int, str], list[FunctionType]] = defaultdict(list)
        self.kills: dict[str, Counter[str]] = defaultdict(Counter)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        from django.db import connections

        self.items = {item.nodeid: item for item in session.items}
        self.next: Any = SimpleNamespace(listchain=lambda: [session])  # keeps the session's fixtures
        first = next(name for name, item in self.items.items() if item.get_closest_marker("django_db"))
        self.error_of(first)  # creates the database
        connections.close_all()
        for each in gc.get_objects():
            if type(each) is FunctionType:  # isinstance() would evaluate lazy objects
                code = each.__code__
                self.functions[code.co_filename, code.co_firstlineno, code.co_qualname].append(each)
        if not self.options.lines.exists():
            print("recorded the lines of", self.fork(list(self.items), None, 7200), flush=True)
        self.lines, seconds, failed = json.loads(self.options.lines.read_text())
        self.seconds.update(seconds)
        self.unknown = self.items.keys() - seconds.keys()  # newer tests, which may execute any line
        gc.freeze()  # the forks share it
        for error in failed:
            print(f"excluded, because it fails without a mutant: {error}", flush=True)
            self.items.pop(error.partition(": ")[0], None)
        if len(failed) < len(self.items) / 100:
            self.result = try_mutants(self, self.options)
        return True

    def tests_of(self, mutant: Mutant) -> list[str]:
        """The tests that execute its line or, if there are none, its statement, its function or its file."""
        lines = self.lines.get(mutant.file, {})
        around = [
            node
            for node in ast.walk(ast.parse(mutant.old))
            if isinstance(node, ast.stmt) and node.lineno <= mutant.line <= (node.end_lineno or 0)
        ]
        is_called = any(isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) for node in around)
        spans = [range(node.lineno, (node.end_lineno or 0) + 1) for node in around]
        near = tests_near(mutant.file)
        for span in [[mutant.line], *sorted(spans, key=len)]:
            if found := {test for line in span for test in lines.get(str(line), []) if test in self.items}:
                break
        else:
            is_called, found = False, {test for tests in lines.values() for test in tests if test in self.items}
        if not is_called:  # only an import executes it, and other files may use its result
            near = (*near, MODULES)
            found |= {test for test in self.items if test.startswith(near)}
        found |= {test for test in self.unknown if test.startswith(near)}
        rank, seconds, by_file, chosen = {}, 0.0, Counter[str](), []
        for test in sorted(found, key=self.seconds.__getitem__):  # the fastest of each file, then the second fastest
            by_file[file := test.partition("::")[0]] += 1
            rank[test] = by_file[file]
        killers = self.kills[mutant.file]
        for test in sorted(rank, key=lambda test: (test not in killers, not test.startswith(near), rank[test])):
            seconds += self.seconds[test]
            if seconds > self.options.seconds and not test.startswith(near):
                break
            chosen.append(test)
        return chosen

    def killer(self, mutant: Mutant, tests: list[str]) -> str:
        """The test that detects it, or ``""``."""
        path = Path(mutant.file).resolve()
        limit = 30 + 8 * sum(self.seconds[test] for test in tests)
        differing = list(
            differences(*(compile(text, path, "exec", dont_inherit=True) for text in (mutant.old, mutant.new)))
        )
        if not differing:
            return NO_DIFFERENCE
        write(path, mutant.new)  # also for processes that tests start
        try:
            old, new = changed_statements(path, mutant) if IMPORTS in differing else (None, None)
            if IMPORTS not in differing:
                killer = self.fork(tests, differing, limit)
                if killer or str(mutant.line) in self.lines.get(mutant.file, {}):
                    return killer
            elif new:
                killer = self.fork(tests, new, limit)
                if killer and not self.fork([killer], old, limit):
                    return killer
                if not killer and all(isinstance(each, (ast.Assign, ast.AnnAssign)) for each in new.body):
                    return ""  # unlike a class, a value has no subclasses of its old version
            command = [sys.executable, "-m", "pytest", "-qx", "--reuse-db", *PYTEST, *tests]
            ran = subprocess.run(command, capture_output=True, text=True, timeout=limit, start_new_session=True)
            return f"pytest ended with {ran.returncode}" if ran.returncode else ""
        except subprocess.TimeoutExpired:
            return LATE
        finally:
            write(path, mutant.old)

    def fork(self, tests: list[str], differing: Any, limit: float) -> str:
        """Run tests in a fork. Return the first that fails with the mutant or, without a mutant, a summary."""
        result = Path("result")
        result.unlink(missing_ok=True)
        if not (child := os.fork()):
            try:
                os.setsid()
                for number in range(3):
                    os.dup2(os.open(os.devnull, os.O_RDWR), number)
                result.write_text(self.trace(tests) if differing is None else self.first_error(tests, differing))
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
        return result.read_text() if result.exists() else "the process ended"

    def error_of(self, test: str) -> str:
        reports = runtestprotocol(self.items[test], nextitem=self.next, log=False)
        return next((f"{test}: {str(report.longrepr)[-500:]}" for report in reports if report.failed), "")

    def first_error(self, tests: list[str], differing: Any) -> str:
        if isinstance(differing, ast.Module):
            run_again(differing)
        else:
            for old, new in differing:
                for function in self.functions[old.co_filename, old.co_firstlineno, old.co_qualname]:
                    function.__code__ = new
        for test in tests:
            # A test that hangs ends only this process.
            faulthandler.dump_traceback_later(30 + 8 * self.seconds[test], exit=True)
            if self.error_of(test):
                return test
        return ""

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
        self.options.lines.write_text(json.dumps([lines, seconds, failed]))
        return f"{len(tests)} tests"


def try_mutants(zygote: Zygote, options: argparse.Namespace) -> int:
    for each in planted():
        killer = zygote.killer(each, zygote.tests_of(each))
        print(f"planted: {killer or 'not detected'}", flush=True)
        if bool(killer) is (each.number == 2):
            return 2
    files = sorted({str(file) for path in options.paths for file in [Path(path), *Path(path).rglob("*.py")]})
    there = [
        (file, number)
        for file in files
        if file.endswith(".py") and not file.endswith(EXCLUDED)
        if not any(name in file for name in (NOT_POSTGRESQL if options.database == "postgres" else ONLY_POSTGRESQL))
        for number in range(len(mutations(file)[1]))
    ]
    chosen = [tuple(one.split("#")) for one in options.only] or there
    if not options.only:  # in random order, so that an interrupted run has tried a random sample
        size = len(there) if options.all else min(options.sample, len(there))
        chosen = random.Random(options.seed).sample(there, size)
    tally: dict[str, Counter[str]] = defaultdict(Counter)
    end = time.monotonic() + 60 * options.minutes
    for count, (file, number) in enumerate(chosen, 1):
        if time.monotonic() > end:
            break
        each = make(file, int(number))
        excuse = each.excuse
        killer = excuse or zygote.killer(each, zygote.tests_of(each))
        print(f"{count}/{len(chosen)} {file}:{each.line}#{number}: {killer or 'SURVIVED'}", flush=True)
        if not killer:
            print(*each.diff, sep="\n", flush=True)
        if killer in zygote.items:
            zygote.kills[file][killer] += 1
        tally[file.rpartition("/")[0]][
            "explained" if excuse or killer == NO_DIFFERENCE else "killed" if killer else "survived"
        ] += 1
    for folder, found in sorted(tally.items()):
        tried, of = found.total(), sum(file.rpartition("/")[0] == folder for file, _ in there)
        score = 100 * found["killed"] / ((tried - found["explained"]) or 1)
        figures = {"mutants": tried, **{name: found[name] for name in ("killed", "explained", "survived")}}
        print(f"{folder}: of {of} mutants, {figures}: killed / (mutants - explained) = {score:.1f} %")
        if not options.only:
            limit = "" if math.isinf(options.minutes) else f" --minutes {options.minutes:g}"
            how = f"--sample {options.sample} --seed {options.seed}"
            command = f"python -m tools.mutation {' '.join(options.paths)} {'--all' if options.all else how}{limit}"
            command += f" --database {options.database} --seconds {options.seconds:g}"
            note(
                "mutation", database=options.database, kind=folder, of=of, seed=options.seed, command=command, **figures
            )
    return 1 if not tally or any(found["survived"] for found in tally.values()) else 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.mutation", description=__doc__)
    parser.add_argument("paths", nargs="*", default=PACKAGES, help="files or folders (default: %(default)s)")
    parser.add_argument("--sample", type=int, default=300, help="number of random mutants (default: %(default)s)")
    parser.add_argument("--all", action="store_true", help="try all mutants")
    parser.add_argument("--minutes", type=float, default=math.inf, help="start no mutant after this many minutes")
    parser.add_argument(
        "--only", action="append", default=[], metavar="FILE#NUMBER", help="try this mutant; may be repeated"
    )
    parser.add_argument("--seed", type=int, default=random.randrange(10**6), help="seed of the sample")
    parser.add_argument("--database", choices=["sqlite", "postgres"], default="sqlite")
    parser.add_argument("--seconds", type=float, default=60, help="limit for tests that tests/README.md does not name")
    parser.add_argument("--lines", type=Path, default=Path("lines"), help="the file that keeps the lines of each test")
    options = parser.parse_args()
    if "MUTATION" not in os.environ:
        with copies(1) as free:
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
    tests = [*TESTS, *(f"--ignore={path}" for path in SLOW)]
    pytest.main(["-q", "-s", *PYTEST, f"--database={options.database}", *tests], plugins=[zygote])
    return zygote.result


if __name__ == "__main__":
    sys.exit(main())
