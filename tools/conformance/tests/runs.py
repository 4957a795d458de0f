"""Runs of the suite against servers of the tests, in which simultaneous requests and strikes meet what they must."""

import socket
import sys
import threading
from contextlib import contextmanager
from dataclasses import replace

from idempotency_key_conformance.cases import LATE
from idempotency_key_conformance.judging import Trial, judge
from idempotency_key_conformance.preflight import prepare
from idempotency_key_conformance.profiles import PROFILES, declare
from idempotency_key_conformance.suite import all_cases
from idempotency_key_conformance.target import Target

from .planted import PATIENCE, Server

BODY = '{"amount": 1, "order": "{unique}"}'

#: Cases of two requests of which one must arrive while the other one runs.
PAIRS = {"two-keys", "in-progress", "retry-after", "other-payload-in-flight", "other-account-in-flight"}
#: Cases in which a connection is cut or delivers its request in pieces.
CONNECTIONS = {"cut-after-the-end", "half-closed", "in-pieces"}


def patience_with(faults):
    """A server that blocks is retried until the patience ends."""
    return 3.0 if any(fault.startswith("blocks-") for fault in faults) else PATIENCE


@contextmanager
def planted(directory, profile, *faults, **options):
    """:returns: the server, and the target to judge."""
    with in_thread(Server(directory, profile, set(faults), **options)) as server:
        yield server, target_at(server.url, patience=patience_with(faults))


@contextmanager
def serving(directory, profile, *faults, **options):
    with planted(directory, profile, *faults, **options) as (_, target):
        yield target


def target_at(server, **options):
    target = Target(
        url=f"{server}/charges",
        body=BODY,
        other_body='{"amount": 2, "order": "{unique}"}',
        refused_body='{"outcome": 402}',
        crashing_body='{"outcome": 500}',
        throttled_body='{"outcome": 429}',
        unavailable_body='{"outcome": 503}',
        other_url=f"{server}/refunds",
        fields=("Content-Type: application/json", "Authorization: alice"),
        other_account="Authorization: bob",
        same_account="Authorization: alice/2",
        count_url=f"{server}/count",
        duplicates=(2, 20),
        timeout=PATIENCE,
        patience=PATIENCE,
    )
    return replace(target, **options)


def run(target, profile, only=("",), *declarations, start=prepare, before=lambda case, trial: None):
    """:param before: called before each case."""
    only = (only,) if isinstance(only, str) else only
    chosen = PROFILES[profile]
    for declaration in declarations:
        chosen = declare(chosen, declaration)
    trial = start(target, chosen)
    results = {}
    for case in all_cases(trial, only):
        before(case, trial)
        results[case.name] = judge(case, trial)
    return results


def after_measuring(trial, then):
    """Call ``then`` after the operations whose time is measured, before the one that is struck or repeated."""

    def measured():
        seconds = Trial.seconds_of_an_operation(trial)
        then()
        return max(seconds, 0.1)  # a request that is struck has arrived by then

    trial.seconds_of_an_operation = measured


def meeting(expect):
    """Before a case of simultaneous requests, the server expects them: it answers none before all have arrived."""

    def before(case, trial):
        if case.name.startswith("concurrent-"):
            expect(int(case.name.removeprefix("concurrent-")))
        elif case.name == "late-duplicates":
            after_measuring(trial, lambda: expect(1 + len(LATE)))
        elif case.name in PAIRS:
            expect(2)

    return before


#: Cases that need a command, which these servers don't have, and cases that the profile doesn't specify.
STRUCK = {"expiry", "restarted", "frozen-while-it-runs"}
STRUCK |= {f"killed-{moment}" for moment in ("early", "while-it-runs", "late", "after-the-effect")}
UNSPECIFIED = {
    "ietf": {"replay-is-marked", "echo", "reordered-payload"},
    "stripe": {"echo", "reordered-payload", "similar-keys: character 300"},
    "acp": {"similar-keys: character 300"},
}


@contextmanager
def in_thread(server):
    """Run a server in a thread until the block ends."""
    with server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def free_port():
    """A free port on the loopback interface."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        if sys.platform == "linux":
            probe.detach()  # while this process lives, the kernel assigns the port to no other one
        return port
