"""A PostgreSQL server whose clock moves while it runs, and no other clock with it."""

import os
import struct
import subprocess
from pathlib import Path
from unittest import mock

from tests.harness.postgres import Server

SOURCE = Path(__file__).with_suffix(".c")


class ClockedServer(Server):
    def __init__(self, url):
        super().__init__(url)
        self._moved, self._library = self.directory / "clock", self.directory / "clock.so"
        self._moved.write_bytes(bytes(8))
        subprocess.run(["gcc", "-shared", "-fPIC", "-O2", "-o", self._library, SOURCE], check=True)
        self.restart()

    def run(self, program, *arguments):
        with mock.patch.dict(os.environ, {"LD_PRELOAD": str(self._library), "CLOCK": str(self._moved)}):
            super().run(program, *arguments)

    def move_clock(self, seconds):
        """Let the clock be so much ahead of this machine's."""
        with self._moved.open("r+b") as moved:  # never shorter, because processes have it in their memory
            moved.write(struct.pack("q", round(seconds * 1_000_000)))
