"""The claim protocol, checked exhaustively by Spin: two clients, two keys, a sweep, a purge, one death, one crash.

Each guard of the protocol is also removed alone. Then Spin must find a history that breaks a promise, or
``REDUNDANT`` explains why there is none.
"""

import itertools
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from idempotency.lifecycle import Decision, Recovery, Status, decide
from tests.model.moves import MOVES
from tests.results import recording

pytestmark = [
    pytest.mark.once,
    pytest.mark.skipif(
        shutil.which("spin") is None or shutil.which("gcc") is None,
        reason="needs Spin: tests/servers.sh install spin. The environment `faults` checks that it is there.",
    ),
]

MODEL = Path(__file__).with_name("protocol.pml")
TRANSACTION = ("-DREQUESTS=1",)
PARK = ("-DREQUESTS=1", "-DPARK")
RETENTION = ("-DREQUESTS=1", "-DCRASHES=0", "-DRETENTION")

#: The guard that is removed, the options of the run, and a part of the assertion that then fails.
BROKEN = {
    "SCOPE": (TRANSACTION, "sent_row[c]==sent_key[c]"),  # after a crash the id belongs to another key
    "PAYLOAD": (TRANSACTION, "payload==sent_payload"),  # after a crash the id belongs to another payload
    "STATUS": (TRANSACTION, "effects"),  # an attempt completes a completed record
    "CLAIMABLE": (TRANSACTION, "effects"),  # a take-over of a record that was completed since it was read
    "ROLLBACK": (TRANSACTION, "effects"),  # the writes of an attempt that lost its lease are kept
    "ABANDONED_AGAIN": (TRANSACTION, "effects"),  # the sweep makes a completed record recoverable
    "SWEEP": (TRANSACTION, ".status!="),  # a claim stays in progress forever
    "WAIT_FOR_DISK": (PARK, "effects"),  # a crash loses the claim, but not its outside effect
    "ID": (RETENTION, "owner"),  # a late attempt changes the record of a later request
    "ATTEMPT": (RETENTION, "owner"),  # a late attempt changes the record of its successor
    "FENCED_RELEASE": (RETENTION, "owner"),  # a late attempt releases the claim of its successor
}
#: Guards whose removal breaks none of the model's promises.
REDUNDANT = {
    # If the answer to COMMIT is lost and the claim is still released, the release waits for the row's lock. Then it
    # finds a completed record or a claim that was rolled back. The refusal to release doesn't depend on that lock.
    "UNKNOWN": TRANSACTION,
    # The update names the attempt that was read, so nothing can have claimed the record since. These two conditions
    # spare a claim that was renewed since. Without them its work would be rolled back, and nothing doubled.
    "RETENTION_AGAIN": RETENTION,
    "LIVE_AGAIN": RETENTION,
    # An operation that may run again is parked only if its handler ended the transaction itself, which the model's
    # handlers don't.
    "PARKED_AGAIN": RETENTION,
    # The purge would delete a claim past its retention. Its attempt then matches no row and is rolled back. If it had
    # an outside effect, no operator would learn of it.
    "PURGEABLE": RETENTION,
}


#: The moves and states that an operation with this recovery never has.
NEVER = {
    Recovery.REEXECUTE: {"parked"},
    Recovery.PARK: {"recoverable", ("in_progress", "in_progress", 1)},
}


def recovery_of(options):
    return Recovery.PARK if "-DPARK" in options else Recovery.REEXECUTE


def table(recovery):
    """``decide()`` in the model's language."""
    names = {Decision.PARK: "PARK_ABANDONED"}
    rows = []
    for status, lease, retention, same in itertools.product(Status, (False, True), (False, True), (False, True)):
        decision = decide(status, lease_over=lease, retention_over=retention, same_payload=same, recovery=recovery)
        name = names.get(decision, decision.name)
        rows.append(f":: s == {status} && l == {lease:d} && r == {retention:d} && p == {same:d} -> d = {name}")
    return "\n".join(["inline decide(d, s, l, r, p) {", "if", *rows, "fi", "}"])


def check(folder, *options, without=""):
    """Check the model.

    :param without: the guard that is removed.

    :returns: the number of states; the broken promise, or an empty text; and, with ``-DMOVES``, the moves of records.
    """
    recovery = recovery_of(options)
    (folder / "decide.pml").write_text(table(recovery))
    (folder / "protocol.pml").write_bytes(MODEL.read_bytes())
    guards = [f"-DWITHOUT_{guard}={guard == without:d}" for guard in (*BROKEN, *REDUNDANT)]
    for command in (
        ["spin", "-a", *options, *guards, "protocol.pml"],
        ["gcc", "-O2", "-w", "-DCOLLAPSE", "-DSAFETY", "-DNOCLAIM", "-o", "pan", "pan.c"],
    ):
        subprocess.run(command, cwd=folder, check=True, capture_output=True)
    checked = subprocess.run(["./pan", "-m100000", "-w22"], cwd=folder, check=True, capture_output=True, text=True)
    assert "max search depth too small" not in checked.stdout
    (states,) = re.findall(r"^ *(\S+) states, stored", checked.stdout, re.MULTILINE)
    (errors,) = re.findall(r"errors: (\d+)", checked.stdout)
    broken = re.search(r"pan:1: (.+) \(at depth", checked.stdout)
    assert (errors == "0") is (broken is None)
    made = {(old, new, int(more)) for old, new, more in re.findall(r"move: (\w+) (\w+) (\d)", checked.stdout)}
    return int(float(states)), "" if broken is None else broken[1], made


@pytest.mark.parametrize("options", [TRANSACTION, PARK, RETENTION, (*PARK, "-DCRASHES=0", "-DRETENTION")], ids=" ".join)
def test_no_history_breaks_a_promise(options, tmp_path):
    with recording("model", options=" ".join(options)) as figures:
        states, broken, made = check(tmp_path, *options, "-DMOVES")
        figures |= {"states": states, "moves": len(made)}
        assert broken == ""
        assert states > 20_000
        assert made <= MOVES.keys()
        if "-DRETENTION" in options:  # these runs make every move that the operation allows
            missing = MOVES.keys() - made
            assert missing == {move for move in MOVES if NEVER[recovery_of(options)] & {move, *move}}


@pytest.mark.parametrize("guard", BROKEN)
def test_without_the_guard_some_history_breaks_a_promise(guard, tmp_path):
    options, promise = BROKEN[guard]
    _, broken, _ = check(tmp_path, *options, without=guard)
    assert promise in broken


def test_a_move_that_is_not_listed_is_detected(tmp_path):
    *_, made = check(tmp_path, *TRANSACTION, "-DMOVES", without="STATUS")
    assert ("completed", "completed", 0) in made - MOVES.keys()


@pytest.mark.parametrize("guard", REDUNDANT)
def test_the_guard_is_redundant_in_the_model(guard, tmp_path):
    assert check(tmp_path, *REDUNDANT[guard], without=guard)[1] == ""


def test_every_guard_of_the_model_is_removed_by_a_test():
    assert set(re.findall(r"WITHOUT_([A-Z_]{2,})", MODEL.read_text())) == BROKEN.keys() | REDUNDANT.keys()
