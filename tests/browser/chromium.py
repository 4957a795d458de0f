"""Chromium from its command line: a page as it is after its scripts have run, and a picture of it."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--force-device-scale-factor=1", "--virtual-time-budget=3000", "--timeout=20000"),
)


def browse(url: str, *options: str, size: tuple[int, int] = (1100, 1500), dark: bool = False) -> str:
    """Open a page with a profile of its own, and return what Chromium prints."""
    program = shutil.which("chromium")
    if program is None:
        # `tox -e browser` has looked before, so that it can't be left out there.
        pytest.skip("there is no chromium; on Debian and Ubuntu, apt-get install chromium gets it")
    theme = ["--force-dark-mode", "--blink-settings=preferredColorScheme=0"] if dark else []
    with tempfile.TemporaryDirectory(prefix="tests-chromium-", ignore_cleanup_errors=True) as profile:
        done = subprocess.run(
            [
                *[program, *FLAGS, *theme, f"--user-data-dir={profile}", f"--window-size={size[0]},{size[1]}"],
                *[*options, url],
            ],
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        )
    return done.stdout


def page_of(url: str, **options: object) -> str:
    """The page as it is after its scripts have run."""
    return browse(url, "--dump-dom", **options)  # type: ignore[arg-type]


def take_picture(url: str, path: Path, *, size: tuple[int, int], dark: bool = False) -> None:
    browse(url, f"--screenshot={path}", size=size, dark=dark)
