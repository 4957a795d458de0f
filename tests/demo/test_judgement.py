"""The demo's judgement of charges and payouts: doubled, lost, wrong, unsettled, parked."""

from __future__ import annotations

import json
from typing import Any

import pytest

from testproject.demo.client import Answer
from testproject.demo.plan import Charge, Trouble
from testproject.demo.verdict import Findings, History, judge

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
