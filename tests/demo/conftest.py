"""A place for the demo's sockets."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def short_directory() -> Iterator[Path]:
    """A socket's path must be short."""
    directory = Path(tempfile.mkdtemp(prefix="t-", dir="/tmp"))
    yield directory
    shutil.rmtree(directory)
