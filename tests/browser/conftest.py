"""A browser of the tests' own, and the server that it visits."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.browser.chromium import FLAGS

#: What a page and a picture need, and a browser that is driven doesn't.
OF_ONE_PAGE = ("--virtual-time-budget", "--timeout")


@pytest.fixture(scope="session")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Headless Chromium, started once."""
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    programs = {name: shutil.which(name) for name in ("chromium", "chromedriver")}
    missing = [name for name, path in programs.items() if path is None]
    if missing:
        # `tox -e browser` has looked before, so that it can't be left out there.
        pytest.skip(f"{' and '.join(missing)} not found: tests/servers.sh install chromium gets them")
    options = webdriver.ChromeOptions()
    options.binary_location = programs["chromium"]
    profile: Path = tmp_path_factory.mktemp("chromium")
    for flag in (*FLAGS, f"--user-data-dir={profile}"):
        if not flag.startswith(OF_ONE_PAGE):
            options.add_argument(flag)
    service = webdriver.ChromeService(executable_path=programs["chromedriver"])
    with webdriver.Chrome(options=options, service=service) as driver:
        yield driver
