"""A headless browser for the tests."""

import shutil

import pytest

FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    "--force-device-scale-factor=1",
)


@pytest.fixture(scope="session")
def chromium(tmp_path_factory):
    """Headless Chromium, started once."""
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    programs = {name: shutil.which(name) for name in ("chromium", "chromedriver")}
    missing = [name for name, path in programs.items() if path is None]
    if missing:
        remedy = "tests/servers.sh install chromium gets them"
        pytest.skip(f"{missing} not found: {remedy}")  # `tox -e browser` checks first, and fails
    options = webdriver.ChromeOptions()
    options.binary_location = programs["chromium"]
    profile = tmp_path_factory.mktemp("chromium")
    for flag in (*FLAGS, f"--user-data-dir={profile}"):
        options.add_argument(flag)
    service = webdriver.ChromeService(executable_path=programs["chromedriver"])
    with webdriver.Chrome(options=options, service=service) as driver:
        yield driver
