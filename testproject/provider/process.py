"""Run the provider as a child process of the demo or of a test."""

import os
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from testproject.harness.processes import Daemon

from .ledger import Effect, read_ledger

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Provider:
    """A running provider, and its ledger."""

    url: str
    ledger: Path

    def effects(self) -> list[Effect]:
        return read_ledger(self.ledger)

    def payouts(self, prefix: str) -> Counter[str]:
        """How often it has paid for each label with this prefix."""
        return Counter(effect.label for effect in self.effects() if effect.label.startswith(f"{prefix}-"))


@contextmanager
def running_provider(ledger: Path, *, deduplicate: bool = False) -> Iterator[Provider]:
    """Run the provider. Existing effects in the ledger are kept."""
    command = [sys.executable, "-m", "testproject.provider", "--ledger", str(ledger)]
    command.append("--deduplicate" if deduplicate else "--no-deduplicate")
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    printed = re.compile(r"^(http://.+)\n", re.MULTILINE)
    with tempfile.TemporaryDirectory(prefix="provider-") as directory:
        log = Path(directory, "provider.log")
        ready = lambda: printed.search(log.read_text()) is not None  # noqa: E731
        with Daemon("provider", command, Path(directory), environment={"PYTHONPATH": path}, is_ready=ready):
            yield Provider(printed.findall(log.read_text())[0], ledger)


@contextmanager
def running_providers(directory: Path) -> Iterator[dict[bool, Provider]]:
    """Run one that deduplicates by key (True), and one that pays for each call that reaches it (False)."""
    with (
        running_provider(directory / "ledger-once.jsonl", deduplicate=True) as once,
        running_provider(directory / "ledger-always.jsonl") as always,
    ):
        yield {True: once, False: always}
