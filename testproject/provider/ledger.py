"""The provider's ledger: an append-only file with a JSON line for each effect, synced before the response is sent."""

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class Effect:
    """One payout. ``id`` counts from 1, ``amount`` is in cents, ``time`` is in seconds since 1970."""

    id: int
    key: str
    label: str
    amount: int
    time: float


class Ledger:
    """The file, open for one writer. It is not thread-safe; the server holds a lock."""

    def __init__(self, path: Path) -> None:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        self._file = os.fdopen(descriptor, "ab", buffering=0)
        # Remove an incomplete last line. A crash cut it off before the response was sent.
        os.ftruncate(descriptor, path.read_bytes().rfind(b"\n") + 1)
        #: A key with more than one effect is a doubled payout.
        self.by_key: dict[str, list[Effect]] = {}
        self._next_id = 1
        for effect in read_ledger(path):
            self._keep(effect)

    def close(self) -> None:
        self._file.close()

    def append(self, key: str, label: str, amount: int, time: float) -> Effect:
        """Add an effect, which is durable when this returns."""
        effect = Effect(self._next_id, key, label, amount, time)
        line = json.dumps(asdict(effect)).encode() + b"\n"
        if self._file.write(line) != len(line):
            raise OSError("The ledger is full.")
        os.fsync(self._file.fileno())
        self._keep(effect)
        return effect

    def _keep(self, effect: Effect) -> None:
        self._next_id += 1
        self.by_key.setdefault(effect.key, []).append(effect)


def read_ledger(path: Path | str) -> list[Effect]:
    """The effects in order, or none before the ledger exists."""
    try:
        lines = Path(path).read_bytes().split(b"\n")
    except FileNotFoundError:
        return []
    return [Effect(**json.loads(line)) for line in lines[:-1]]  # text after the last newline is incomplete
