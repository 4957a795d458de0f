"""Run the provider for as long as somebody needs it."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

START_LIMIT = 30.0  # seconds; it imports the standard library only, but the machine may be busy
STOP_LIMIT = 10.0
ROOT = Path(__file__).resolve().parents[2]


class ProviderError(RuntimeError):
    """The provider did not start."""


@contextmanager
def running_provider(ledger: Path | str, *, deduplicate: bool = False, port: int = 0) -> Iterator[str]:
    """Run the provider on 127.0.0.1 and yield its address, "http://127.0.0.1:12345".

    ``ledger`` may exist: its effects are then remembered. The process ends with the block, or with its owner should
    that be killed.

    :raises ProviderError: it did not start.
    """
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "testproject.provider", "--ledger", str(ledger), "--port", str(port)),
            *("--deduplicate" if deduplicate else "--no-deduplicate", "--until-eof"),
        ],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,  # a Ctrl-C in the terminal goes to the owner, which then decides
    )
    try:
        yield _address(process)
    finally:
        process.terminate()
        try:
            process.wait(STOP_LIMIT)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()


def _address(process: subprocess.Popen[bytes]) -> str:
    assert process.stdout is not None
    ready, _, _ = select.select([process.stdout], [], [], START_LIMIT)
    address = process.stdout.readline().decode().strip() if ready else ""
    if not address:
        raise ProviderError("The stand-in payment provider did not start; what it said of it is on standard error.")
    return address
