"""The demo: its judgement, its plan, and small real runs of it on the database of the session."""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from django.db import connection

from testproject.demo.client import Answer
from testproject.demo.plan import Charge, Plan, Trouble, add_arguments, arguments_of, draw_charges, plan_from
from testproject.demo.tally import Seen
from testproject.demo.verdict import Findings, History, complaints, judge

ROOT = Path(__file__).resolve().parent.parent
CHARGE = Charge(
    number=0,
    account="alice",
    key="run-0",
    label="run-0",
    amount=1000,
    trouble=Trouble.CALM,
    burst=1,
    late_duplicate=True,
    changed_payload=True,
)
EFFECTS = {("alice", "run-0"): [7]}


def created(pk: int = 7, **changes: Any) -> Answer:
    values = {"status": 201, "content_type": "application/json", "location": f"/charges/{pk}/"}
    return Answer(**{**values, "body": json.dumps({"id": pk}).encode(), **changes})


REJECTED = Answer(
    status=422, content_type="application/problem+json", location=None, body=b"{}", code="idempotency_key_reused"
)
CONFLICT = Answer(
    status=409, content_type="application/problem+json", location=None, body=b"{}", code="idempotency_in_progress"
)


class TestJudgement:
    def test_one_effect_and_one_outcome_pass(self) -> None:
        history = History(CHARGE, answers=[created(), created(replayed=True)], answers_to_changed=[REJECTED])
        found = judge([history], EFFECTS)
        assert found == Findings(operations=1, effects=1, doubled=0, lost=0, wrong=0, unsettled=0)

    def test_a_second_effect_is_doubled_even_if_every_client_was_told_the_same(self) -> None:
        found = judge([History(CHARGE, answers=[created(), created()])], {("alice", "run-0"): [7, 8]})
        assert (found.effects, found.doubled, found.wrong) == (2, 1, 0)

    def test_an_acknowledged_charge_without_an_effect_is_lost(self) -> None:
        assert judge([History(CHARGE, answers=[created()])], {}).lost == 1

    def test_the_effect_of_another_account_under_the_same_label_does_not_count(self) -> None:
        found = judge([History(CHARGE, answers=[created()])], {("bob", "run-0"): [7]})
        assert found.lost == 1

    @pytest.mark.parametrize(
        "other",
        [
            created(8),
            created(status=200),
            created(location="/charges/8/"),
            created(content_type="text/html"),
            created(body=b'{"id":  7}'),
            CONFLICT,
        ],
        ids=["effect", "status", "location", "type", "bytes", "still in progress"],
    )
    def test_an_answer_that_differs_from_the_first_is_wrong(self, other: Answer) -> None:
        assert judge([History(CHARGE, answers=[created(), other])], EFFECTS).wrong == 1

    @pytest.mark.parametrize("body", [b'{"id": 9}', b"{}", b"no json", b"[]"])
    def test_an_answer_that_does_not_name_the_effect_is_wrong(self, body: bytes) -> None:
        assert judge([History(CHARGE, answers=[created(body=body)])], EFFECTS).wrong == 1

    @pytest.mark.parametrize("answer", [created(), CONFLICT], ids=["accepted", "in progress"])
    def test_a_changed_payload_that_is_not_rejected_is_wrong(self, answer: Answer) -> None:
        history = History(CHARGE, answers=[created()], answers_to_changed=[answer])
        assert judge([history], EFFECTS).wrong == 1

    def test_a_client_that_gave_up_is_reported(self) -> None:
        assert judge([History(CHARGE, answers=[created()], gave_up=1)], EFFECTS).unsettled == 1

    def test_an_effect_that_no_charge_accounts_for_shows_in_the_count(self) -> None:
        found = judge([History(CHARGE, answers=[created()])], {**EFFECTS, ("alice", "run-9"): [9]})
        assert (found.operations, found.effects) == (1, 2)


GOOD = {"operations": 20, "effects": 20, "doubled": 0, "lost": 0, "wrong": 0, "unsettled": 0}
CONTROL = Findings(**{**GOOD, "effects": 30, "doubled": 10, "wrong": 9})
ALL_SEEN = dict.fromkeys(Seen, 1)


class TestVerdict:
    def test_a_run_without_a_fault_passes(self) -> None:
        assert complaints(Findings(**GOOD), CONTROL, ALL_SEEN, kills=3, take_overs=2, can_be_outlived=True) == []

    @pytest.mark.parametrize(
        ("fault", "value"),
        [("effects", 19), ("effects", 21), ("doubled", 1), ("lost", 1), ("wrong", 1), ("unsettled", 1)],
    )
    def test_any_fault_on_the_protected_side_fails(self, fault: str, value: int) -> None:
        found = Findings(**{**GOOD, fault: value})
        assert len(complaints(found, CONTROL, ALL_SEEN, kills=3, take_overs=2, can_be_outlived=True)) == 1

    @pytest.mark.parametrize(
        "never", [Seen.KILLED_AT_WORK, Seen.OUTLIVED, Seen.CUT, Seen.TIMEOUT, Seen.REPLAY, Seen.CONFLICT, Seen.MISMATCH]
    )
    def test_a_storm_in_which_a_trouble_never_came_fails(self, never: Seen) -> None:
        seen = {**ALL_SEEN, never: 0}
        assert len(complaints(Findings(**GOOD), CONTROL, seen, kills=3, take_overs=2, can_be_outlived=True)) == 1

    @pytest.mark.parametrize(("kills", "take_overs"), [(0, 2), (3, 0)])
    def test_a_storm_without_a_killed_worker_or_a_take_over_fails(self, kills: int, take_overs: int) -> None:
        assert (
            len(
                complaints(
                    Findings(**GOOD), CONTROL, ALL_SEEN, kills=kills, take_overs=take_overs, can_be_outlived=True
                )
            )
            == 1
        )

    def test_a_control_that_doubled_nothing_fails(self) -> None:
        assert (
            len(complaints(Findings(**GOOD), Findings(**GOOD), ALL_SEEN, kills=3, take_overs=2, can_be_outlived=True))
            == 1
        )


class TestPlan:
    def test_the_same_seed_draws_the_same_storm(self) -> None:
        assert draw_charges(Plan(seed=5), "run") == draw_charges(Plan(seed=5), "run")
        assert draw_charges(Plan(seed=5), "run") != draw_charges(Plan(seed=6), "run")

    @pytest.mark.parametrize("seed", range(20))
    def test_the_smallest_storm_has_every_trouble(self, seed: int) -> None:
        charges = draw_charges(Plan(operations=20, seed=seed), "run")
        assert len(charges) == 20
        assert {charge.trouble for charge in charges} == set(Trouble)
        assert any(charge.changed_payload for charge in charges)
        keys = [charge.key for charge in charges]
        assert len(set(keys)) < len(keys), "no key is shared by two accounts"

    def test_an_account_never_uses_a_key_twice(self) -> None:
        charges = draw_charges(Plan(operations=5000), "run")
        scopes = {(charge.account, charge.key) for charge in charges}
        assert len(scopes) == len({charge.label for charge in charges}) == 5000

    def test_options_survive_the_way_to_the_process_that_runs_the_storm(self) -> None:
        plan = Plan(operations=77, workers=3, concurrency=9, kill_every=0.5, lease=3, time_limit=9.5, seed=-4)
        parser = argparse.ArgumentParser()
        add_arguments(parser)
        assert plan_from(vars(parser.parse_args(arguments_of(plan)))) == plan

    @pytest.mark.parametrize("options", [["--operations", "19"], ["--workers", "0"], ["--lease", "x"]])
    def test_an_option_out_of_its_bounds_is_refused(self, options: list[str]) -> None:
        parser = argparse.ArgumentParser()
        add_arguments(parser)
        with pytest.raises(SystemExit):
            parser.parse_args(options)


@pytest.fixture
def database(django_db_blocker: Any, tmp_path: Path) -> Iterator[str]:
    """The URL of an empty database beside the session's own, which the storm may fill."""
    url = os.environ.get("DATABASE_URL", "sqlite:///")
    if url.startswith("sqlite"):
        yield f"sqlite:///{tmp_path / 'demo.sqlite3'}"
        return
    name = f"test_demo_{os.getpid()}"
    with django_db_blocker.unblock():
        with connection.cursor() as cursor:
            cursor.execute(f"CREATE DATABASE {name}")
        try:
            yield urlsplit(url)._replace(path=f"/{name}").geturl()
        finally:
            with connection.cursor() as cursor:
                cursor.execute(f"DROP DATABASE {name} WITH (FORCE)")
            connection.close()


@contextmanager
def demo(database: str, *options: str) -> Iterator[subprocess.Popen[str]]:
    """A run of the command, in a process of its own."""
    process = subprocess.Popen(
        [sys.executable, "manage.py", "demo", "--database", database, *options],
        cwd=ROOT,
        env={**os.environ, "COLUMNS": "120"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        yield process
    finally:
        process.terminate()
        process.communicate(timeout=60)


def test_a_real_storm_leaves_one_effect_for_each_charge(database: str) -> None:
    with demo(database, "--operations", "60", "--time-limit", "120") as process:
        printed, _ = process.communicate(timeout=180)
    assert process.returncode == 0, printed
    assert "PASSED. Protected: 60 charges, 60 effects" in printed


def test_an_interrupted_storm_leaves_no_server_behind(database: str) -> None:
    with demo(database, "--operations", "2000") as process:
        assert process.stdout is not None
        port = next(int(line.split("127.0.0.1:")[1].split(",")[0]) for line in process.stdout if "127.0.0.1:" in line)
        process.send_signal(signal.SIGTERM)
        printed, _ = process.communicate(timeout=60)
    assert process.returncode == 130, printed
    assert "Interrupted" in printed
    assert not listens(port)


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
