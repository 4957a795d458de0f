"""The suite detects each planted fault by the listed case, and no fault in a correct server."""

import shlex
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from idempotency_key_conformance import connections, crashes
from idempotency_key_conformance.judging import Verdict
from idempotency_key_conformance.profiles import PROFILES

from .planted import PATIENCE
from .runs import (
    CONNECTIONS,
    STRUCK,
    UNSPECIFIED,
    after_measuring,
    free_port,
    meeting,
    patience_with,
    planted,
    run,
    serving,
    target_at,
)


def run_planted(directory, profile, *faults, only=("",)):
    with planted(directory, profile, *faults) as (server, target):
        meets = meeting(server.expect)

        def before(case, trial):
            meets(case, trial)
            server.strikes_next = case.name in CONNECTIONS
            server.waits_for_the_cut = case.name == "cut-after-the-end"
            if case.name == "cut-after-the-end":
                server.strikes_next = False
                after_measuring(trial, lambda: setattr(server, "strikes_next", True))

        return run(target, profile, only, before=before)


@pytest.mark.parametrize("profile", sorted(PROFILES))
def test_a_server_that_conforms_to_the_profile_passes(profile, tmp_path):
    results = run_planted(tmp_path, profile)
    seen = {name: (result.verdict.value, result.detail) for name, result in results.items()}
    skipped = {name for name, result in results.items() if result.verdict is Verdict.NOT_JUDGED}
    assert skipped == STRUCK | UNSPECIFIED[profile], seen
    assert {result.verdict for result in results.values()} == {Verdict.PASSED, Verdict.NOT_JUDGED}, seen


#: The wrong servers: the fault, the profile of the server, the case that detects it, and a part of its detail.
FAULTS = [
    ("ignores-keys", "stripe", "sequential", "4 effects instead of 1"),
    ("changes-body", "stripe", "replay-is-equal", "body differs"),
    ("changes-status", "acp", "replay-is-equal", "the retry's was 200"),
    ("drops-headers", "stripe", "replay-is-equal", "Location was"),
    ("unmarked", "stripe", "replay-is-marked", "Idempotent-Replayed: None"),
    ("marks-everything", "stripe", "replay-is-marked", "first answer has"),
    ("no-echo", "acp", "echo", "None"),
    ("races", "stripe", "concurrent-2", "2 effects instead of 1"),
    ("races", "acp", "concurrent-20", "effects instead of 1"),
    ("short-lease", "ietf", "late-duplicates", "effects instead of 1"),
    ("odd-statuses", "stripe", "in-progress", "expected 409"),
    ("refuses-nothing", "ietf", "concurrent-2", "2 different successes"),
    ("plain-errors", "stripe", "in-progress", "error object"),
    ("plain-errors", "acp", "in-progress", "flat error"),
    ("waits-for-years", "ietf", "retry-after", "more than 600 seconds"),
    ("waits-oddly", "ietf", "retry-after", "neither a number of seconds nor a date"),
    ("ignores-payload", "stripe", "other-payload", "expected 400"),
    ("ignores-payload", "ietf", "other-payload", "expected 422, got 201"),
    ("refuses-nothing", "ietf", "other-payload", "expected 422, got 200"),
    ("breaks-on-reuse", "ietf", "other-payload", "expected 422, got 500"),
    ("shows-the-body", "ietf", "other-payload", "a refusal shows"),
    ("shows-a-member", "acp", "other-payload", "a refusal shows run"),
    ("shows-the-location", "stripe", "other-payload", "a refusal shows Location"),
    ("payload-in-scope", "stripe", "other-payload", "2 effects"),
    ("payload-in-scope", "ietf", "other-payload-in-flight", "2 effects"),
    ("refuses-nothing", "acp", "other-payload-in-flight", "0 of two payloads"),
    ("order-matters", "acp", "reordered-payload", "422"),
    ("key-alone", "ietf", "other-account", "and 1 had an effect"),
    ("one-lock", "acp", "other-account-in-flight", "it was refused: 409"),
    ("one-answer", "ietf", "other-account", "another one's result"),
    ("serves-strangers", "ietf", "no-credentials", "1 effects instead of 2"),
    ("path-blind", "ietf", "other-path", "requests got a success"),
    ("path-blind", "stripe", "other-path", "expected 400"),
    ("path-blind", "acp", "other-path", "1 effects instead of 2"),
    ("method-blind", "acp", "other-method: PUT", "1 effects instead of 2"),
    ("breaks-on-methods", "ietf", "other-method: PATCH", "broke the server"),
    ("skips-one", "acp", "similar-keys: the first character", "requests got a success"),
    ("folds-case", "stripe", "similar-keys: case", "requests got a success"),
    ("folds-case+fingerprints-the-key", "ietf", "similar-keys: case", "was refused after"),
    ("drops-blanks", "ietf", "similar-keys: blanks", "requests got a success"),
    ("strips", "ietf", "similar-keys: a blank at the end", "requests got a success"),
    ("like", "stripe", "similar-keys: _", "requests got a success"),
    ("like", "acp", "similar-keys: %", "requests got a success"),
    ("cuts-at-35", "stripe", "similar-keys: character 36", "requests got a success"),
    ("cuts-at-36", "ietf", "similar-keys: character 64", "requests got a success"),
    ("cuts-at-64", "acp", "similar-keys: character 255", "requests got a success"),
    ("cuts-at-255", "ietf", "similar-keys: character 300", "requests got a success"),
    ("runs-without-key", "acp", "missing-key", "expected 400"),
    ("breaks-on-keys", "stripe", "missing-key", "was refused"),
    ("takes-any-key", "acp", "key: 256 characters", "to be refused"),
    ("breaks-on-keys", "ietf", "key: two fields", "got 500"),
    ("forgets-errors", "stripe", "client-error", "body differs"),
    ("unmarked", "acp", "client-error", "not marked as a replay"),
    ("wrong-5xx", "acp", "server-error", "got the recorded answer"),
    ("wrong-5xx", "stripe", "server-error", "body differs"),
    ("hides-errors", "stripe", "server-error", "retry's was 404"),
    ("blocks-after-5xx", "ietf", "server-error", "ended with 409"),
    ("records-429", "ietf", "throttled", "got the recorded answer"),
    ("records-503", "acp", "unavailable", "got the recorded answer"),
    ("runs-half-requests", "stripe", "cut-before-the-end", "taken for a whole one"),
    ("forgets-on-cut", "stripe", "cut-after-the-end", "2 effects"),
    ("forgets-on-cut", "stripe", "half-closed", "body differs"),
    ("reads-half", "stripe", "in-pieces", "ended with 400"),
    ("remembers-few", "ietf", "remembered", "1 effects instead of 0"),
    ("repeats-later", "acp", "late-effects", "after the case"),
]
#: Servers that break only a SHOULD of the profile.
DEVIATIONS = [
    ("plain-errors", "ietf", "in-progress", "neither application/problem"),
    ("no-retry-after", "acp", "retry-after", "no Retry-After"),
    ("one-account", "ietf", "other-account", "it was refused"),
    ("runs-without-key", "ietf", "missing-key", "expected 400, got 201"),
    ("takes-any-key", "ietf", "key: bare", "to be refused"),
    ("unmarked", "acp", "replay-is-marked", "Idempotent-Replayed: None"),
]


def judged(directory, fault, profile, case):
    return run_planted(directory, profile, *fault.split("+"), only=case)[case]


def ids(faults):
    return [f"{profile}-{fault}-{case}" for fault, profile, case, _ in faults]


@pytest.mark.parametrize(("fault", "profile", "case", "message"), FAULTS, ids=ids(FAULTS))
def test_each_wrong_server_is_detected(fault, profile, case, message, tmp_path):
    result = judged(tmp_path, fault, profile, case)
    assert (result.verdict, message in result.detail) == (Verdict.FAILED, True), result


@pytest.mark.parametrize(("fault", "profile", "case", "message"), DEVIATIONS, ids=ids(DEVIATIONS))
def test_a_server_that_ignores_a_should_deviates(fault, profile, case, message, tmp_path):
    result = judged(tmp_path, fault, profile, case)
    assert (result.verdict, message in result.detail) == (Verdict.DEVIATES, True), result


def test_an_early_answer_is_detected(tmp_path, monkeypatch):
    monkeypatch.setattr(connections, "EARLY", PATIENCE)  # the wait ends with the answer
    result = judged(tmp_path, "answers-early", "acp", "in-pieces")
    assert (result.verdict, "before it was complete" in result.detail) == (Verdict.FAILED, True), result


def test_a_server_may_give_up_a_half_closed_connection(tmp_path):
    result = judged(tmp_path, "half-closed-is-gone", "stripe", "half-closed")
    assert (result.verdict, "dropped the connection" in result.detail) == (Verdict.PASSED, True), result


@pytest.mark.parametrize(("fault", "verdict"), [("", Verdict.PASSED), ("records-429", Verdict.FAILED)])
def test_an_operation_may_be_busy_once(fault, verdict, tmp_path):
    with serving(tmp_path, "ietf", fault) as target:
        target = replace(target, throttled_body='{"busy": "{unique}"}')
        assert run(target, "ietf", "throttled")["throttled"].verdict is verdict


class Clock:
    """The clock of the judge and of the server, which advances only while the judge sleeps."""

    def __init__(self):
        self.now = 1.0

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


def test_an_expired_key_is_new_and_one_that_never_expires_is_detected(tmp_path, monkeypatch):
    clock = Clock()
    monkeypatch.setattr(crashes, "time", clock)
    faults = ["", "never-expires", "refuses-expired", "expires-at-half"]
    verdicts = []
    for fault in faults:
        with serving(tmp_path, "stripe", fault, ttl=100, clock=clock.monotonic) as target:
            verdicts.append(run(replace(target, ttl=100), "stripe", "expiry")["expiry"].verdict)
    assert verdicts == [Verdict.PASSED, *[Verdict.FAILED] * 3]


@contextmanager
def struck(directory, *faults):
    """Two processes on one port that can be killed, restarted, frozen and thawed.

    While the file ``hold`` exists, an operation does not end, and a strike waits for one.
    """
    port, group, frozen = free_port(), directory / "group", directory / "frozen"
    hold, held, listens = directory / "hold", directory / "held", directory / "listens"
    serve = [sys.executable, str(Path(__file__).with_name("planted.py")), str(directory), str(port), "stripe", *faults]
    meet = f"while [ -e {hold} ] && ! [ -e {held} ]; do sleep 0.01; done"
    kill = f"{meet}; kill -KILL -$(cat {group}); rm -f {hold} {held}"
    start = f"rm -f {listens}; {shlex.join(serve)} >/dev/null 2>&1 & echo $! > {group}"
    start = f"{start}; until [ -e {listens} ]; do sleep 0.01; done"
    shell = lambda command: shlex.join(["sh", "-c", command])  # noqa: E731
    subprocess.run(shlex.split(shell(start)), check=True)
    try:
        commands = {
            "kill": kill,
            "restart": start,
            "freeze": f"{meet}; cp {held} {frozen}; kill -STOP $(cat {frozen}); rm {hold} {held}",
            "thaw": f"kill -CONT $(cat {frozen})",
        }
        commands = {name: shell(command) for name, command in commands.items()}
        yield target_at(f"http://127.0.0.1:{port}", patience=patience_with(faults), commands=commands)
    finally:
        subprocess.run(shlex.split(shell(kill)), check=True)


def holding(directory, fault):
    """Before a case that strikes a running operation, let the operation run until the strike."""
    hold = directory / "hold"

    def before(case, trial):
        after_measuring(trial, hold.touch)
        # The correct server shows the effect only when the operation has ended.
        if fault and case.name == "killed-after-the-effect":
            hold.touch()

    return before


#: The wrong servers that a crash, a restart or a freeze reveals, and the correct one.
CRASHES = [
    *(("", f"killed-{moment}", "1 effect") for moment in crashes.MOMENTS),
    ("answers-late", "killed-after-the-effect", "1 effect"),
    ("", "frozen-while-it-runs", "1 effect"),
    ("loses-on-restart", "restarted", "body differs"),
    ("effect-before-record", "killed-early", "2 effects"),
    ("effect-before-record", "killed-while-it-runs", "2 effects"),
    ("effect-before-record", "killed-late", "2 effects"),
    ("effect-before-record", "killed-after-the-effect", "2 effects"),
    ("record-before-effect", "killed-while-it-runs", "0 effects instead of 1"),
    ("blocks-after-a-crash", "killed-while-it-runs", "ended with 409"),
    ("unfenced", "frozen-while-it-runs", "4 effects of 3 requests"),
]


@pytest.mark.parametrize(("fault", "case", "message"), CRASHES)
def test_a_crash_reveals_wrong_servers_only(fault, case, message, tmp_path):
    with struck(tmp_path, *filter(None, [fault])) as target:
        results = run(target, "stripe", case, before=holding(tmp_path, fault))
    for result in results.values():
        expected = Verdict.PASSED if fault in ("", "answers-late") else Verdict.FAILED
        assert (result.verdict, message in result.detail) == (expected, True), result


def test_a_server_may_declare_that_an_outcome_stays_unknown(tmp_path):
    with struck(tmp_path, "parks-after-a-crash") as target:
        before = holding(tmp_path, "parks-after-a-crash")
        [result] = run(target, "stripe", "killed-while-it-runs", "unknown=409", before=before).values()
    assert (result.verdict, "0 effects, and the last answer was 409" in result.detail) == (Verdict.PASSED, True), result


def test_the_outcome_of_a_server_error_may_stay_unknown(tmp_path):
    with serving(tmp_path, "stripe", "parks-after-a-crash") as target:
        result = run(target, "stripe", "server-error", "unknown=409")["server-error"]
    assert (result.verdict, "the outcome is unknown, as declared" in result.detail) == (Verdict.PASSED, True), result
