"""Clients' requests and responses, and whether one record for each key explains them.

A history is linearizable if each call can be given a moment between its start and its end, so that the calls, one after
the other at these moments, are answered as a record would answer them. The search is Wing and Gong's ("Testing and
Verifying Concurrent Objects", 1993), with two shortcuts from Lowe's paper ("Testing for Linearizability", 2017): each
key is searched separately, and no configuration twice.
"""

import json
from collections import defaultdict
from dataclasses import asdict, dataclass
from hashlib import sha256
from math import inf

#: The values of Idempotency-Status. PARKED stands for the status "unknown" of a parked operation.
EXECUTED, REPLAYED, RECORDED, PARKED = "executed", "replayed", "recorded", "parked"
IN_PROGRESS, REUSED, UNKNOWN = "in-progress", "reused", "unknown"
#: The header that passes the id of a call to its handler.
CALL_HEADER = "X-Call"


@dataclass(frozen=True, kw_only=True)
class Call:
    """A client's request, and its answer. The times are monotonic seconds, which all processes of a machine share."""

    id: str
    key: str
    payload: str = ""
    start: float
    #: Infinite if the answer leaves the result open, because the operation may still take effect.
    end: float = inf
    answer: str = UNKNOWN
    outcome: str | None = None
    #: The call whose handler made the outcome, if the outcome names it. A reconciler's outcome names none.
    author: str | None = None

    @classmethod
    def answered(cls, *, end, headers, status, body, **sent):
        """The call that was ``sent``, with its answer."""
        answer = headers.get("Idempotency-Status", UNKNOWN)
        if answer in {UNKNOWN, "ignored"}:  # an unprotected route has crashed
            is_parked = b"idempotency_outcome_unknown" in body
            return cls(**sent, **{"end": end, "answer": PARKED} if is_parked else {})
        if answer not in {EXECUTED, REPLAYED}:
            return cls(**sent, end=end, answer=answer)
        outcome = f"{status} {sha256(body).hexdigest()[:16]}"
        return cls(**sent, end=end, answer=answer, outcome=outcome, author=_author(body))

    @classmethod
    def of(cls, text):
        return cls(**json.loads(text))

    def __str__(self):
        return json.dumps(asdict(self))


def _author(body):
    try:
        facts = json.loads(body)
    except ValueError:
        return None
    return facts.get("call") if isinstance(facts, dict) else None


def by_key(calls):
    histories = defaultdict(list)
    for call in calls:
        histories[call.key].append(call)
    return histories


def violations(calls, *, lease):
    """The histories that no record explains, as texts, by key.

    :param lease: for how many seconds a claim blocks its key if its attempt could not release it.
    """
    return {
        key: "; ".join(map(str, sorted(history, key=lambda call: call.start)))
        for key, history in by_key(calls).items()
        if not is_linearizable(history, Record(history, lease))
    }


def is_linearizable(calls, record):
    """Whether the record explains the calls of its key."""
    everything = frozenset(range(len(calls)))
    to_try, tried = [(everything, None)], set()
    while to_try:
        configuration = left, state = to_try.pop()
        # A call without an answer may never take effect.
        if all(calls[place].answer == UNKNOWN for place in left):
            return True
        if configuration in tried:
            continue
        tried.add(configuration)
        # The call that ends first took effect before any call that starts later.
        first_end = min(calls[place].end for place in left)
        possible = [place for place in left if calls[place].start <= first_end]
        following = [(left - {place}, after) for place in possible for after in record.after(state, calls[place])]
        # A call that changes nothing may as well come now, because it neither enables nor prevents another call.
        to_try += [each for each in following if each[1] == state][:1] or following
    return False


class Record:
    """The model. Its state is None before the outcome, and then the outcome with its payload, or PARKED.

    A live claim is not a state, because clients can't observe when it begins and ends. A refusal because of it needs
    another call whose attempt may be running.
    """

    def __init__(self, calls, lease):
        self._lease = lease
        #: The outcomes that an attempt without an answer may have recorded: those that clients have received.
        self._replayed = {(call.outcome, call.author) for call in calls if call.answer in {REPLAYED, RECORDED}}
        #: The ids of answers that an attempt of another call explains.
        self._explained = {
            call.id for call in calls if any(self._explains(other, call) for other in calls if other is not call)
        }

    def _explains(self, other, call):
        if other.answer == REUSED or other.start > call.end:
            return False
        if call.answer == REPLAYED:
            # A reconciler may find the effect of an attempt that has lost its lease, regardless of its response.
            return call.author is None and other.answer in {REPLAYED, IN_PROGRESS} and other.payload == call.payload
        if call.answer == IN_PROGRESS:
            # A claim that its attempt could not release blocks the key until its lease is over.
            return other.end + self._lease >= call.start
        return call.answer == PARKED or other.payload != call.payload

    def after(self, state, call):
        """The states after a call. There are none if the record would not give this answer in this state."""
        match call.answer:
            case "executed":
                # Once, and with the outcome of its handler.
                return [(call.outcome, call.payload)] * (state is None and call.author in {None, call.id})
            case "replayed":
                outcome = call.outcome, call.payload
                return [outcome] * (state == outcome or (state is None and call.id in self._explained))
            case "recorded":
                return [state] * (isinstance(state, tuple) and state[1] == call.payload)
            case "in-progress":
                return [state] * (state is None and call.id in self._explained)
            case "parked":
                return [PARKED] * (state == PARKED or (state is None and call.id in self._explained))
            case "reused":
                is_other = state[1] != call.payload if isinstance(state, tuple) else call.id in self._explained
                return [state] * is_other
            case "not-recorded":
                # Its response is never replayed: only executed and unknown calls have an outcome.
                return [state] * (state is None)
            case "unknown":
                outcomes = {outcome for outcome, author in self._replayed if author in {None, call.id}}
                return [(outcome, call.payload) for outcome in outcomes if state is None]
        return []
