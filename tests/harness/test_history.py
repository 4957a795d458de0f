"""Each rule of the model refuses a history, and allows another that differs in one point."""

import re
from math import inf

import pytest

from tests.harness.history import Call, violations

LEASE = 2.0
CALL = re.compile(
    r"(?P<id>\w) (?P<start>[\d.]+)-(?P<end>[\d.]*) (?P<answer>[\w-]+)"
    r"( (?P<outcome>[A-Z]))?( of (?P<author>\w))?( for (?P<payload>\w))?"
)
#: Each rule, and below it a legal history and an illegal one. "a 0-1 executed X of b" is call a, from 0 to 1, with an
#: outcome X that call b has made.
RULES = """
an operation is executed once
    a 0-1 executed X; b 2-3 replayed X | a 0-1 executed X; b 2-3 executed X
only one of two concurrent calls is executed
    a 0-1 executed X; b 0-1 replayed X | a 0-1 executed X; b 0-1 executed Y
a replay has the outcome that was executed
    a 0-1 executed X; b 2-3 replayed X | a 0-1 executed X; b 2-3 replayed Y
all replays have one outcome
    a 0- unknown; b 2-3 replayed Y; c 4-5 replayed Y | a 0- unknown; b 2-3 replayed Y; c 4-5 replayed X
a replay follows an execution
    a 0- unknown; b 2-3 replayed Y | a 4- unknown; b 2-3 replayed Y
a replay ends after its execution begins
    a 2.5-4 executed X; b 2-3 replayed X | a 3.5-4 executed X; b 2-3 replayed X
a call without an answer takes effect once
    a 0- unknown; b 2-3 replayed Y | a 0- unknown; b 2-3 replayed Y; c 4-5 executed Z
a call without an answer has no effect after an execution
    a 0- unknown; b 0-1 executed X; c 2-3 replayed X | a 0- unknown; b 0-1 executed X; c 2-3 replayed Y
a call without an answer may take effect late or never
    a 0- unknown; b 2-3 not-recorded; c 4-5 replayed Y | a 0- unknown; b 2-3 replayed Y; c 4-5 not-recorded
an outcome names the call that executed it
    a 0-1 executed X of a | a 0-1 executed X of b
a replayed outcome may be of a call whose end is not known
    a 0- unknown; b 0-1 not-recorded; c 2-3 replayed Y of a | a 0- unknown; b 0-1 not-recorded; c 2-3 replayed Y of b
a reconciler finds the effect of an attempt that lost its lease
    a 0-3 in-progress; b 1-2 replayed X | a 0-3 not-recorded; b 1-2 replayed X
only a reconciler finds an effect
    a 0-3 in-progress; b 1-2 replayed X | a 0-3 in-progress; b 1-2 replayed X of a
an effect is found for its payload
    a 0-3 in-progress; b 1-2 replayed X | a 0-3 in-progress for q; b 1-2 replayed X
an unrecorded response is not replayed
    a 0-1 not-recorded; b 2-3 executed Y | a 0-1 not-recorded; b 2-3 replayed Y
not-recorded is impossible once there is an outcome
    a 0-1 executed X; b 0.5-3 not-recorded | a 0-1 executed X; b 2-3 not-recorded
in-progress is possible while another attempt may be running
    a 0-1 executed X; b 0.5-0.6 in-progress | a 0.7-1 executed X; b 0.5-0.6 in-progress
in-progress is impossible once there is an outcome
    a 0- unknown; b 0-1 executed X; c 0.9-3 in-progress | a 0- unknown; b 0-1 executed X; c 2-3 in-progress
in-progress is possible after an attempt whose end is not known
    a 0- unknown; b 9-10 in-progress | b 9-10 in-progress
an unreleased claim blocks its key until its lease is over
    a 0-1 not-recorded; b 2-3 in-progress | a 0-1 not-recorded; b 4-5 in-progress
reused answers another payload
    a 0-1 executed X; b 2-3 reused for q | a 0-1 executed X; b 2-3 reused
reused answers the later payload
    a 0- unknown; b 2-3 reused for q | a 0- unknown; b 2-3 reused
a refused payload starts no attempt
    a 0-1 in-progress; b 0-1 reused for q; c 0-3 executed X | a 0-1 in-progress; b 0-1 reused for q; c 9-10 executed X
another payload gets no replay
    a 0-1 executed X; b 2-3 replayed X | a 0-1 executed X; b 2-3 replayed X for q
an outcome that can't be sent counts
    a 0- unknown; b 2-3 recorded | a 0- unknown; b 2-3 recorded; c 4-5 executed Y
an outcome that can't be sent belongs to its payload
    a 0-1 executed X; b 2-3 recorded | a 0-1 executed X; b 2-3 recorded for q
a parked operation was interrupted
    a 0- unknown; b 2-3 parked | b 2-3 parked
a parked operation stays parked
    a 0- unknown; b 2-3 parked; c 4-5 parked | a 0- unknown; b 2-3 parked; c 4-5 executed X
an operation with an outcome is not parked
    a 0- unknown; b 0-3 parked; c 1-2 in-progress | a 0- unknown; a 0-1 executed X; b 2-3 parked
"""


def history(text):
    for call in text.split("; "):
        members = CALL.fullmatch(call).groupdict()
        start, end, payload = members.pop("start"), members.pop("end") or inf, members.pop("payload") or ""
        yield Call(**members, key="k", start=float(start), end=float(end), payload=payload)


@pytest.mark.parametrize(("rule", "histories"), re.findall(r"^(\w.*)\n    (.*)", RULES, re.MULTILINE))
def test_an_illegal_history_is_detected_and_its_legal_twin_is_not(rule, histories):
    legal, illegal = histories.split(" | ")
    assert violations(history(legal), lease=LEASE) == {}, rule
    assert set(violations(history(illegal), lease=LEASE)) == {"k"}, rule


@pytest.mark.parametrize(
    ("headers", "status", "body", "expected"),
    [
        ({"Idempotency-Status": "executed"}, 201, b'{"call": "a"}', ("executed", 1.0, "a")),
        ({"Idempotency-Status": "replayed"}, 402, b"no JSON", ("replayed", 1.0, None)),
        ({"Idempotency-Status": "replayed"}, 200, b"[1]", ("replayed", 1.0, None)),
        ({"Idempotency-Status": "in-progress"}, 409, b"{}", ("in-progress", 1.0, None)),
        ({"Idempotency-Status": "unknown"}, 409, b'{"code": "idempotency_outcome_unknown"}', ("parked", 1.0, None)),
        ({"Idempotency-Status": "unknown"}, 503, b"{}", ("unknown", inf, None)),
        ({"Idempotency-Status": "ignored"}, 500, b"{}", ("unknown", inf, None)),
        ({}, 500, b"<h1>Server Error (500)</h1>", ("unknown", inf, None)),
    ],
)
def test_a_call_is_read_from_its_answer(headers, status, body, expected):
    made = Call.answered(id="a", key="k", start=0.0, end=1.0, headers=headers, status=status, body=body)
    assert (made.answer, made.end, made.author) == expected
    assert (made.outcome is None) == (made.answer not in {"executed", "replayed"})
    assert Call.of(str(made)) == made
