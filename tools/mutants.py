"""Plants each bug that ``mutants.toml`` lists, one at a time, and checks that the named tests fail.

    python tools/mutants.py                    # all; exits with 1 if one survives, with 2 if one can't be tried
    python tools/mutants.py --only NAME        # one; may be repeated
    python tools/mutants.py --check            # only check that each can be applied

A mutant is applied to a temporary copy of the tree. The tree itself is never changed. The named tests first run on the
unchanged copy, because a test that fails anyway proves nothing.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIST = Path(__file__).with_suffix(".toml")
EXCLUDED = (".git", ".venv", ".tox", ".*_cache", "__pycache__", "build", "dist")
DATABASES = ("sqlite", "postgres")

#: pytest's exit codes if it ran all tests, and they passed or some failed.
PASSED, FAILED = 0, 1

KILLED, SURVIVED = "killed", "SURVIVED"

#: Seconds for the tests of one mutant, which may make them hang in a place that pytest-timeout can't interrupt.
PATIENCE = 3600


class WrongListError(Exception):
    """A mutant can't be applied, or its tests can't be run."""


@dataclass(frozen=True)
class Mutant:
    """A bug, and the tests that must detect it."""

    name: str
    file: str
    #: Occurs exactly once in the file.
    old: str
    new: str
    #: The consequence for users.
    why: str
    #: Files or pytest node ids.
    tests: tuple[str, ...]
    database: str = "sqlite"

    def apply(self, root: Path) -> str:
        """The file's text with the bug.

        :raises WrongListError: the text to replace does not occur exactly once.
        """
        path = root / self.file
        text = path.read_text() if path.exists() else ""
        if (count := text.count(self.old)) != 1:
            raise WrongListError(f"its text is {count} times in {self.file}")
        return text.replace(self.old, self.new)


def read_list(text: str) -> list[Mutant]:
    """The mutants of a list, in its order."""
    tables = tomllib.loads(text)
    return [Mutant(name, **{**fields, "tests": tuple(fields["tests"])}) for name, fields in tables.items()]


def wrong_entries(mutants: Sequence[Mutant], root: Path) -> list[str]:
    """Mistakes in the list: a text that does not occur exactly once, a bug that changes nothing, a missing test."""
    if not mutants:
        return ["0 mutants were checked"]
    wrong = []
    for mutant in mutants:
        try:
            ast.parse(mutant.apply(root) if mutant.file.endswith(".py") else "")
        except (WrongListError, SyntaxError) as error:
            wrong.append(f"{mutant.name}: {error}")
        if mutant.old == mutant.new:
            wrong.append(f"{mutant.name}: it changes nothing")
        if mutant.database not in DATABASES:
            wrong.append(f"{mutant.name}: it names the database {mutant.database!r}")
        if not mutant.tests:
            wrong.append(f"{mutant.name}: it names no test")
        for test in mutant.tests:
            file, _, function = test.partition("::")
            path = root / file
            if not path.is_file() or f"def {function}" not in path.read_text():
                wrong.append(f"{mutant.name}: there is no test {test}")
    return wrong


@contextmanager
def copies(count: int) -> Iterator[queue.Queue[Path]]:
    """A pool of copies of the tree."""
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        free: queue.Queue[Path] = queue.Queue()
        for number in range(count):
            copy = Path(folder, str(number))
            shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(*EXCLUDED))
            free.put(copy)
        yield free


def run_tests(copy: Path, tests: Sequence[str], database: str, url: str = "") -> subprocess.CompletedProcess[str]:
    """Run tests in a copy until the first one fails, on the database of ``url`` or on a new one."""
    # The figures of a broken copy must not be recorded.
    environment = {name: value for name, value in os.environ.items() if name not in {"DATABASE_URL", "RESULTS"}}
    environment |= {"PYTHONPATH": str(copy)} | ({"DATABASE_URL": url} if url else {})
    options = ["-q", "-x", "-p", "no:cacheprovider", "--timeout=240", f"--database={database}"]
    command = [sys.executable, "-m", "pytest", *options, *tests]
    return subprocess.run(
        command, cwd=copy, env=environment, capture_output=True, text=True, check=False, timeout=PATIENCE
    )


def write(path: Path, text: str) -> None:
    """Write a module, and delete its bytecode: it looks valid if size and modification second stay the same."""
    path.write_text(text)
    Path(importlib.util.cache_from_source(str(path))).unlink(missing_ok=True)


def is_killed(mutant: Mutant, copy: Path) -> bool:
    """Whether the mutant's tests detect it.

    :raises WrongListError: the tests can't be run.
    """
    path = copy / mutant.file
    sound, broken = path.read_text(), mutant.apply(copy)
    try:
        write(path, broken)
        ran = run_tests(copy, mutant.tests, mutant.database)
    except subprocess.TimeoutExpired as error:
        raise WrongListError(f"{mutant.name}: its tests don't end") from error
    finally:
        write(path, sound)
    if ran.returncode not in {PASSED, FAILED}:
        raise WrongListError(f"{mutant.name}: pytest ended with {ran.returncode}\n{ran.stdout[-2000:]}{ran.stderr}")
    return ran.returncode == FAILED


def try_soundness(mutants: Sequence[Mutant], copy: Path) -> None:
    """:raises WrongListError: one of the tests fails without a mutant."""
    where = run_python(copy, "import idempotency; print(idempotency.__file__)")
    if not Path(where).is_relative_to(copy):
        raise WrongListError(f"the tests would import {where}, which no mutant changes")
    for database in DATABASES:
        tests = sorted({test for mutant in mutants if mutant.database == database for test in mutant.tests})
        if tests and (ran := run_tests(copy, tests, database)).returncode != PASSED:
            raise WrongListError(f"on {database} the tests don't pass without a mutant\n{ran.stdout[-4000:]}")


def run_python(copy: Path, code: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(copy)}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, check=True).stdout.strip()


def try_all(mutants: Sequence[Mutant], jobs: int) -> int:
    """Try the mutants and report each.

    :returns: the exit code.
    :raises WrongListError: the tests don't pass without a mutant.
    """
    killed, survivors = 0, []
    with copies(jobs) as free, ThreadPoolExecutor(jobs) as pool:
        copy = free.get()
        try_soundness(mutants, copy)
        free.put(copy)

        def attempt(mutant: Mutant) -> tuple[str, float]:
            copy, begun = free.get(), time.monotonic()
            try:
                verdict = KILLED if is_killed(mutant, copy) else SURVIVED
            except WrongListError as error:
                verdict = str(error)
            finally:
                free.put(copy)
            return verdict, time.monotonic() - begun

        for mutant, (verdict, seconds) in zip(mutants, pool.map(attempt, mutants), strict=True):
            print(f"{verdict:8} {mutant.name} ({seconds:.0f} s)", flush=True)
            killed += verdict == KILLED
            if verdict == SURVIVED:
                survivors.append(mutant)
    print(f"{len(mutants)} mutants, {killed} killed, {len(survivors)} survived")
    for mutant in survivors:
        print(f"  {mutant.name} in {mutant.file}: {mutant.why}")
    if killed + len(survivors) < len(mutants):
        return 2
    return 1 if survivors else 0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--list", action="store_true", help="list the mutants with their reasons")
    parser.add_argument("--check", action="store_true", help="only check that each mutant can be applied")
    parser.add_argument("--only", action="append", metavar="NAME", help="try this mutant; may be repeated")
    parser.add_argument("--database", choices=DATABASES, help="try the mutants that are tested on this database")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="mutants tried in parallel (default: 1)")
    options = parser.parse_args(arguments)
    mutants = read_list(LIST.read_text())
    if unknown := set(options.only or ()) - {mutant.name for mutant in mutants}:
        parser.error(f"no mutant is named {', '.join(sorted(unknown))}")
    chosen = [
        mutant
        for mutant in mutants
        if options.database in {None, mutant.database} and (options.only is None or mutant.name in options.only)
    ]
    if options.list:
        for mutant in chosen:
            print(f"{mutant.name}: {mutant.why} ({mutant.file}, {mutant.database})")
        return 0
    if wrong := wrong_entries(chosen, ROOT):
        print(*wrong, sep="\n")
        return 2
    if options.check:
        print(f"{len(chosen)} mutants can be applied")
        return 0
    try:
        return try_all(chosen, max(1, options.jobs))
    except WrongListError as error:
        print(error)
        return 2


if __name__ == "__main__":
    sys.exit(main())
