"""Run the provider as a process of the demo or of a test."""

import os
import re
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from testproject.harness.processes import Daemon

from .ledger import Effect, read_ledger

ROOT = Path(__file__).resolve().parents[2]


@contextmanager
def running_provider(ledger: Path | str, *, deduplicate: bool = False) -> Iterator[str]:
    """Run the provider, and yield its address, "http://127.0.0.1:12345". Effects in the ledger are kept."""
    command = [sys.executable, "-m", "testproject.provider", "--ledger", str(ledger)]
    command.append("--deduplicate" if deduplicate else "--no-deduplicate")
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    said = re.compile(r"^(http://.+)\n", re.MULTILINE)
    with tempfile.TemporaryDirectory(prefix="provider-") as directory:
        log = Path(directory, "provider.log")
        ready = lambda: said.search(log.read_text()) is not None  # noqa: E731
        with Daemon("provider", command, Path(directory), environment={"PYTHONPATH": path}, is_ready=ready):
            yield said.findall(log.read_text())[0]


@dataclass(frozen=True)
class Provider:
    """One that runs, and its ledger."""

    url: str
    ledger: Path

    def effects(self) -> list[Effect]:
        return read_ledger(self.ledger)


@contextmanager
def running_providers(directory: Path) -> Iterator[dict[bool, Provider]]:
    """Run one that deduplicates by key (True), and one that pays for each call that reaches it (False)."""
    with ExitStack() as stack:
        providers = {}
        for deduplicate in (True, False):
            ledger = directory / f"ledger-{'once' if deduplicate else 'always'}.jsonl"
            address = stack.enter_context(running_provider(ledger, deduplicate=deduplicate))
            providers[deduplicate] = Provider(address, ledger)
        yield providers
