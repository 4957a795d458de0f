"""The suite finds each planted fault by the case that is named for it, and none in a server without one."""

import shlex
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import replace

import pytest

from idempotency.conformance.cases import plain_cases
from idempotency.conformance.crashes import crash_cases
from idempotency.conformance.judging import Trial, Verdict, judge
from idempotency.conformance.profiles import PROFILES, Level, declare
from idempotency.conformance.target import Target
from testproject.harness.processes import answers, free_port, wait_until
from tests.conformance.planted import Server
from tests.harness.servers import in_thread

pytestmark = pytest.mark.once

BODY = '{"amount": 1, "order": "{unique}"}'


@contextmanager
def serving(directory, profile, *faults, **options):
    with in_thread(Server(directory, profile, set(faults), **options)) as server:
        yield target_at(server.url)


def target_at(server, **options):
    target = Target(
        url=f"{server}/charges",
        body=BODY,
        other_body='{"amount": 2, "order": "{unique}"}',
        refused_body='{"outcome": 402}',
        crashing_body='{"outcome": 500}',
        other_url=f"{server}/refunds",
        fields=("Content-Type: application/json", "Authorization: alice"),
        other_account="Authorization: bob",
        count_url=f"{server}/count",
        duplicates=(2, 20),
        timeout=10.0,
        patience=5.0,
    )
    return replace(target, **options)


def run(target, profile, only="", *declarations):
    chosen = PROFILES[profile]
    for declaration in declarations:
        chosen = declare(chosen, declaration)
    trial = Trial(target, chosen)
    cases = [case for case in (*plain_cases(trial), *crash_cases()) if case.name.startswith(only)]
    return {case.name: judge(case, trial) for case in cases}


#: Cases that need a command, which these servers don't have, or that the profile has nothing to say about.
STRUCK = {"expiry", "restarted", "killed-while-it-runs", "frozen-while-it-runs"}
UNSPECIFIED = {
    "ietf": {"replay-is-marked", "echo", "reordered-payload", "client-error", "server-error"},
    "stripe": {"echo", "reordered-payload"},
    "acp": set(),
}


@pytest.mark.parametrize("profile", sorted(PROFILES))
def test_a_server_that_keeps_the_profile_passes(profile, tmp_path):
    with serving(tmp_path, profile) as target:
        results = run(target, profile)
    seen = {name: (result.verdict.value, result.detail) for name, result in results.items()}
    skipped = {name for name, result in results.items() if result.verdict is Verdict.NOT_JUDGED}
    assert skipped == STRUCK | UNSPECIFIED[profile], seen
    assert {result.verdict for result in results.values()} == {Verdict.PASSED, Verdict.NOT_JUDGED}, seen


#: The fault, the profile of the server, the case that finds it, and what it says.
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
    ("odd-statuses", "stripe", "in-progress", "expected 409"),
    ("plain-errors", "ietf", "in-progress", "neither application/problem"),
    ("plain-errors", "stripe", "in-progress", "error object"),
    ("plain-errors", "acp", "in-progress", "flat error"),
    ("no-retry-after", "acp", "retry-after", "no Retry-After"),
    ("ignores-payload", "stripe", "other-payload", "expected 400"),
    ("payload-in-scope", "stripe", "other-payload", "2 effects"),
    ("payload-in-scope", "ietf", "other-payload-in-flight", "2 effects"),
    ("refuses-nothing", "ietf", "other-payload-in-flight", "0 of two payloads"),
    ("order-matters", "acp", "reordered-payload", "422"),
    ("key-alone", "ietf", "other-account", "1 effects instead of 2"),
    ("one-account", "ietf", "other-account", "it was refused"),
    ("path-blind", "ietf", "other-path", "1 effects instead of 2"),
    ("path-blind", "stripe", "other-path", "expected 400"),
    ("path-blind", "acp", "other-path", "1 effects instead of 2"),
    ("runs-without-key", "acp", "missing-key", "expected 400"),
    ("breaks-on-keys", "stripe", "missing-key", "was refused"),
    ("takes-any-key", "acp", "key: 256 characters", "to be refused"),
    ("takes-any-key", "ietf", "key: bare", "to be refused"),
    ("takes-no-key", "acp", "key: bare", "to be accepted"),
    ("breaks-on-keys", "ietf", "key: two fields", "got 500"),
    ("forgets-errors", "stripe", "client-error", "body differs"),
    ("unmarked", "acp", "client-error", "no Idempotent-Replayed"),
    ("wrong-5xx", "acp", "server-error", "marked as a replay"),
    ("wrong-5xx", "stripe", "server-error", "body differs"),
    ("runs-half-requests", "stripe", "cut-before-the-end", "taken for a whole one"),
    ("forgets-on-cut", "stripe", "cut-after-the-end", "2 effects"),
    ("forgets-on-cut", "stripe", "half-closed", "body differs"),
    ("answers-early", "acp", "in-pieces", "before it was complete"),
    ("reads-what-is-there", "stripe", "in-pieces", "ended with 400"),
]


@pytest.mark.parametrize(("fault", "profile", "case", "message"), FAULTS, ids=[f"{f[1]}-{f[0]}-{f[2]}" for f in FAULTS])
def test_each_fault_is_found(fault, profile, case, message, tmp_path):
    with serving(tmp_path, profile, fault) as target:
        result = run(target, profile, case)[case]
    binds = result.rule.level is Level.MUST or "2 effects" in message
    assert result.verdict is (Verdict.FAILED if binds else Verdict.DEVIATES), result.detail
    assert message in result.detail


def test_a_server_may_give_up_a_half_closed_connection(tmp_path):
    with serving(tmp_path, "stripe", "half-closed-is-gone") as target:
        result = run(target, "stripe", "half-closed")["half-closed"]
    assert (result.verdict, "gave up the connection" in result.detail) == (Verdict.PASSED, True), result


def test_an_expired_key_is_new_and_one_that_never_expires_is_found(tmp_path):
    faults = {"": Verdict.PASSED, "never-expires": Verdict.FAILED, "refuses-expired": Verdict.FAILED}
    for fault, verdict in faults.items():
        with serving(tmp_path, "stripe", fault, ttl=0.1) as target:
            assert run(replace(target, ttl=0.1), "stripe", "expiry")["expiry"].verdict is verdict


@contextmanager
def struck(directory, *faults):
    """Two processes on one port that can be killed, restarted, frozen and thawed."""
    port, group, frozen = free_port(), directory / "group", directory / "frozen"
    serve = [sys.executable, "-m", "tests.conformance.planted", str(directory), str(port), "stripe", *faults]
    kill, start = f"kill -KILL -$(cat {group})", f"{shlex.join(serve)} >/dev/null 2>&1 & echo $! > {group}"
    shell = lambda command: shlex.join(["sh", "-c", command])  # noqa: E731
    subprocess.run(shlex.split(shell(start)), check=True)
    try:
        wait_until(lambda: answers(("127.0.0.1", port)), "the planted server listens", 30)
        commands = {
            "kill": kill,
            "restart": start,
            "freeze": f"cp {directory / 'working'} {frozen}; kill -STOP $(cat {frozen})",
            "thaw": f"kill -CONT $(cat {frozen})",
        }
        commands = {name: shell(command) for name, command in commands.items()}
        yield target_at(f"http://127.0.0.1:{port}", patience=10.0, commands=commands)
    finally:
        subprocess.run(shlex.split(shell(kill)), check=True)


@pytest.mark.parametrize(
    ("fault", "case", "message"),
    [
        ("loses-on-restart", "restarted", "body differs"),
        ("effect-before-record", "killed-while-it-runs", "2 effects"),
        ("unfenced", "frozen-while-it-runs", "2 effects"),
    ],
)
def test_each_fault_of_a_crash_is_found(fault, case, message, tmp_path):
    (tmp_path / "right").mkdir()
    with struck(tmp_path / "right") as target:
        right = run(target, "stripe", case)[case]
    assert right.verdict is Verdict.PASSED, right.detail
    with struck(tmp_path, fault) as target:
        wrong = run(target, "stripe", case)[case]
    assert wrong.verdict is Verdict.FAILED, wrong.detail
    assert message in wrong.detail
