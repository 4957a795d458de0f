"""Each rule of the model refuses a history, and allows one beside it that differs in one point."""

import json
from math import inf

import pytest

from tests.harness.history import Call, violations

LEASE = 2.0
EXECUTED, REPLAYED, RECORDED, PARKED = "executed", "replayed", "recorded", "parked"
BUSY, REUSED, NOT_RECORDED, UNKNOWN = "in-progress", "reused", "not-recorded", "unknown"


def call(name, start, end, answer, outcome=None, author=None, payload="p"):
    """One call of the key."""
    end = inf if answer == UNKNOWN else end
    return Call(id=name, key="k", payload=payload, start=start, end=end, answer=answer, outcome=outcome, author=author)


FIRST = call("a", 0, 1, EXECUTED, "X")
CUT_OFF = call("a", 0, 1, UNKNOWN)
OTHER = call("b", 2, 3, REPLAYED, "Y")

#: By its rule: a legal history, and an illegal one.
RULES = {
    "an operation is executed once": (
        [FIRST, call("b", 2, 3, REPLAYED, "X")],
        [FIRST, call("b", 2, 3, EXECUTED, "X")],
    ),
    "of two calls at once one is executed": (
        [FIRST, call("b", 0, 1, REPLAYED, "X")],
        [FIRST, call("b", 0, 1, EXECUTED, "Y")],
    ),
    "a replay has the outcome that was executed": (
        [FIRST, call("b", 2, 3, REPLAYED, "X")],
        [FIRST, OTHER],
    ),
    "all replays have one outcome": (
        [CUT_OFF, OTHER, call("c", 4, 5, REPLAYED, "Y")],
        [CUT_OFF, OTHER, call("c", 4, 5, REPLAYED, "X")],
    ),
    "a replay follows an execution": (
        [CUT_OFF, OTHER],
        [call("a", 4, 5, UNKNOWN), OTHER],
    ),
    "a replay ends after its execution begins": (
        [call("a", 2.5, 4, EXECUTED, "X"), call("b", 2, 3, REPLAYED, "X")],
        [call("a", 3.5, 4, EXECUTED, "X"), call("b", 2, 3, REPLAYED, "X")],
    ),
    "a call without an answer takes effect once": (
        [CUT_OFF, OTHER],
        [CUT_OFF, OTHER, call("c", 4, 5, EXECUTED, "Z")],
    ),
    "a call without an answer may take effect late or never": (
        [CUT_OFF, call("b", 2, 3, NOT_RECORDED), call("c", 4, 5, REPLAYED, "Y")],
        [CUT_OFF, call("b", 2, 3, REPLAYED, "Y"), call("c", 4, 5, NOT_RECORDED)],
    ),
    "an outcome names the call that executed it": (
        [call("a", 0, 1, EXECUTED, "X", author="a")],
        [call("a", 0, 1, EXECUTED, "X", author="b")],
    ),
    "what is replayed was made by a call whose end is not known": (
        [CUT_OFF, call("b", 0, 1, NOT_RECORDED), call("c", 2, 3, REPLAYED, "Y", author="a")],
        [CUT_OFF, call("b", 0, 1, NOT_RECORDED), call("c", 2, 3, REPLAYED, "Y", author="b")],
    ),
    "a reconciler finds the effect of an attempt that lost its lease": (
        [call("a", 0, 3, BUSY), call("b", 1, 2, REPLAYED, "X")],
        [call("a", 0, 3, NOT_RECORDED), call("b", 1, 2, REPLAYED, "X")],
    ),
    "what was not recorded is not replayed": (
        [call("a", 0, 1, NOT_RECORDED), call("b", 2, 3, EXECUTED, "Y")],
        [call("a", 0, 1, NOT_RECORDED), OTHER],
    ),
    "not-recorded is no answer once there is an outcome": (
        [FIRST, call("b", 0.5, 3, NOT_RECORDED)],
        [FIRST, call("b", 2, 3, NOT_RECORDED)],
    ),
    "in-progress is an answer while another attempt may be running": (
        [FIRST, call("b", 0.5, 0.6, BUSY)],
        [call("a", 0.7, 1, EXECUTED, "X"), call("b", 0.5, 0.6, BUSY)],
    ),
    "in-progress is no answer once there is an outcome": (
        [FIRST, call("b", 0.9, 3, BUSY)],
        [FIRST, call("b", 2, 3, BUSY)],
    ),
    "in-progress is an answer after an attempt whose end is not known": (
        [CUT_OFF, call("b", 9, 10, BUSY)],
        [call("b", 9, 10, BUSY)],
    ),
    "a claim that was not released is in the way until its lease is over": (
        [call("a", 0, 1, NOT_RECORDED), call("b", 2, 3, BUSY)],
        [call("a", 0, 1, NOT_RECORDED), call("b", 4, 5, BUSY)],
    ),
    "reused is an answer to another payload": (
        [FIRST, call("b", 2, 3, REUSED, payload="q")],
        [FIRST, call("b", 2, 3, REUSED)],
    ),
    "reused is an answer to the later payload": (
        [CUT_OFF, call("b", 2, 3, REUSED, payload="q")],
        [call("b", 2, 3, REUSED, payload="q"), call("c", 4, 5, EXECUTED, "X")],
    ),
    "another payload is not replayed to": (
        [FIRST, call("b", 2, 3, REPLAYED, "X")],
        [FIRST, call("b", 2, 3, REPLAYED, "X", payload="q")],
    ),
    "an outcome that can't be sent is one": (
        [CUT_OFF, call("b", 2, 3, RECORDED)],
        [CUT_OFF, call("b", 2, 3, RECORDED), call("c", 4, 5, EXECUTED, "Y")],
    ),
    "an outcome that can't be sent is that of the payload": (
        [FIRST, call("b", 2, 3, RECORDED)],
        [FIRST, call("b", 2, 3, RECORDED, payload="q")],
    ),
    "what is parked was cut off": (
        [CUT_OFF, call("b", 2, 3, PARKED)],
        [call("b", 2, 3, PARKED)],
    ),
    "what is parked stays so": (
        [CUT_OFF, call("b", 2, 3, PARKED), call("c", 4, 5, PARKED)],
        [CUT_OFF, call("b", 2, 3, PARKED), call("c", 4, 5, EXECUTED, "X")],
    ),
    "what has an outcome is not parked": (
        [CUT_OFF, call("b", 0, 3, PARKED), call("c", 1, 2, BUSY)],
        [CUT_OFF, FIRST, call("b", 2, 3, PARKED)],
    ),
}


@pytest.mark.parametrize("rule", RULES)
def test_a_history_that_breaks_a_rule_is_found_and_its_twin_is_not(rule):
    legal, illegal = RULES[rule]
    assert violations(legal, lease=LEASE) == {}
    assert set(violations(illegal, lease=LEASE)) == {"k"}


@pytest.mark.parametrize(
    ("headers", "status", "body", "expected"),
    [
        ({"Idempotency-Status": "executed"}, 201, b'{"call": "a"}', (EXECUTED, 1.0, "a")),
        ({"Idempotency-Status": "replayed"}, 402, b"no JSON", (REPLAYED, 1.0, None)),
        ({"Idempotency-Status": "replayed"}, 200, b"[1]", (REPLAYED, 1.0, None)),
        ({"Idempotency-Status": "in-progress"}, 409, b"{}", (BUSY, 1.0, None)),
        ({"Idempotency-Status": "unknown"}, 409, b'{"code": "idempotency_outcome_unknown"}', (PARKED, 1.0, None)),
        ({"Idempotency-Status": "unknown"}, 503, b"{}", (UNKNOWN, inf, None)),
        ({"Idempotency-Status": "ignored"}, 500, b"{}", (UNKNOWN, inf, None)),
        ({}, 500, b"<h1>Server Error (500)</h1>", (UNKNOWN, inf, None)),
    ],
)
def test_a_call_is_read_from_its_answer(headers, status, body, expected):
    made = Call.answered(id="a", key="k", start=0.0, end=1.0, headers=headers, status=status, body=body)
    assert (made.answer, made.end, made.author) == expected
    assert (made.outcome is None) == (made.answer not in {EXECUTED, REPLAYED})
    assert Call.of(str(made)) == made
    assert json.loads(str(made))["id"] == "a"
