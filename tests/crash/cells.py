"""One cell: break a process at a place, and let fresh processes find out."""

import itertools
import threading
import time
import zlib
from contextlib import ExitStack

from tests.crash.points import LATE_CALL, OF_A_SWEEP, OF_RECONCILING, OF_RELEASING, blocks_everybody
from tests.crash.processes import LIMIT, Processes, Verdict
from tests.harness.zygote import ImpossibleError, wait_until

#: A lease that a cell waits for by the real clock, in seconds.
SHORT_LEASE = 0.5
#: Four heartbeats, of which the first one is broken.
HEARTBEAT = 10.0

#: How wrong a clock is, in seconds.
HOUR = 3600.0

#: Two purges at once would purge each other's records.
PURGING = threading.Lock()

_numbers = itertools.count(1)


def run_cell(arena, cell, mutations=(), **spec):
    """``spec`` goes to every worker."""
    verdict = Verdict(cell)
    name = f"{next(_numbers)}-{cell}"
    with ExitStack() as stack:
        if cell.point == "purge.selected":
            stack.enter_context(PURGING)
        run = Run(arena, cell, stack.enter_context(arena.observer(name)), name, verdict)
        run.spec = {"mutations": mutations, **spec}
        stack.callback(run.end)
        try:
            run.play()
        except (ImpossibleError, TimeoutError) as error:
            verdict.problems.append(str(error))
    if not verdict.fired:
        verdict.problems.append("the fault never fired")
    return verdict


class Run(Processes):
    """A cell on its way."""

    def __init__(self, arena, cell, observer, name, verdict):
        super().__init__(arena, cell, observer, name, verdict)
        # What the seed decides, and the cell: which of two ways its process is prepared, and who comes first.
        self.coin = (zlib.crc32(" ".join(cell.kind).encode()) + cell.seed) % 2 == 0

    # Breaking

    def prepare(self):
        """Bring the record to where the cell's place can be reached."""
        cell = self.cell
        if cell.point in {"replay.read", "purge.selected"}:
            self.ask()
        if (
            cell.point in (*OF_A_SWEEP, *OF_RECONCILING, "takeover.sent")
            or (cell.point in OF_RELEASING and cell.declaration == "ask")
        ):  # fmt: skip
            # With or without an effect; a sweep releases what was certainly not executed.
            unpaid = self.coin or cell.point in OF_RELEASING or cell.fault == "stop-live"
            self.kill_at("handler.before" if unpaid else "downstream.answered")
            self.observer.end_lease(self.operation)

    def start_victim(self):
        cell = self.cell
        spec = {"arms": [[cell.point, "stop" if cell.fault == "stop-live" else cell.fault]]}
        job = "request"
        if cell.point in OF_A_SWEEP or (cell.point in OF_RELEASING and cell.declaration == "ask"):
            job = "sweep"
        elif cell.point in OF_RELEASING:
            spec["fail"] = True
        elif cell.point == "purge.selected":
            job = "purge"
        elif cell.point in OF_RECONCILING and not self.coin:
            job = "sweep"
        if cell.point == "heartbeat.before":
            spec |= {"lease": SHORT_LEASE, "heartbeat": HEARTBEAT}
        if self.waits_by_the_real_clock:
            spec["lease"] = SHORT_LEASE
        victim = self.fork(job, **spec)
        event = victim.expect("reached")
        self.verdict.fired = True
        if cell.fault == "drop":
            self.observer.end_session(event["session"], self.operation)
            victim.go()
        if cell.point == "downstream.sent":
            # The call is on its way. What a provider promises is to answer for it within the lease.
            wait_until(self.payouts, "the provider receives the call")
        return victim

    @property
    def waits_by_the_real_clock(self):
        """The provider refuses a call that a frozen process makes after its lease, by a clock that no test can move."""
        cell = self.cell
        return cell.declaration == "ask" and cell.point in LATE_CALL and cell.fault.startswith("stop")

    def end_lease(self):
        if self.waits_by_the_real_clock:
            wait_until(lambda: self.observer.lease_is_over(self.operation), "the lease ends")
        else:
            super().end_lease()

    # A cell

    def play(self):
        if self.cell.fault == "skew":
            self.overlap()
        elif self.cell.point == "purge.selected":
            self.purge()
        else:
            self.request()

    def request(self):
        cell = self.cell
        self.prepare()
        victim = self.start_victim()
        if cell.fault == "kill":
            self.bury(victim)
        elif cell.fault in {"raise", "drop"}:
            self.answered(victim)
        else:
            self.freeze(victim)
        if not cell.fault.startswith("stop") and self.coin:
            self.sweep()
        self.converge()
        self.judge()

    def freeze(self, victim):
        """The victim sleeps beyond its lease while another one wins, and goes on."""
        cell = self.cell
        victim.wait_until_stopped()
        self.end_lease()
        rival = None
        before = None
        if blocks_everybody(cell, self.arena.database):
            for answer in (self.ask(), self.ask()):
                if answer["status"] < 400:
                    self.problem(f"another one ran while the file was locked: {answer}")
        elif cell.fault == "stop":
            self.converge()
        else:
            rival = self.start_rival()
            before = self.observer.record(self.operation)
        victim.wake()
        victim.go()
        self.answered(victim)
        if rival is not None:
            after = self.observer.record(self.operation)
            if before != after:
                self.problem(f"P6: a stale attempt changed its rival's live claim from {before} to {after}")
            rival.go()
            self.answered(rival)

    def overlap(self):
        """Not a fault: while the claim's owner lives, processes ask whose clocks are an hour fast and an hour slow."""
        owner = self.fork(arms=[[self.cell.point, "gate"]])
        owner.expect("reached")
        self.verdict.fired = True
        before = self.observer.record(self.operation)
        for skew in (HOUR, -HOUR):
            answer = self.ask(skew=skew)
            if answer["code"] != "idempotency_in_progress":
                self.problem(f"a living claim was not respected by a process with a wrong clock: {answer}")
        self.answered(self.fork("sweep", skew=HOUR))
        after = self.observer.record(self.operation)
        if before != after:
            self.problem(f"P6: a living claim was changed from {before} to {after}")
        owner.go()
        self.answered(owner)
        self.converge()
        self.judge()

    def start_rival(self):
        """Another attempt that has won, and is held before it ends."""
        # Where it is held depends on the seed. A place that it doesn't meet is no place to be held at, so the last one
        # is met by everybody who runs; and a reconciler that finds the payout has nothing left to run.
        places = [("handler.wrote",), ("reconcile.before", "handler.wrote"), ("step.started", "render.before")]
        held = places[0 if self.payouts() else self.cell.seed % 3]
        if self.payouts():
            held += ("reconcile.before",)
        deadline = time.monotonic() + LIMIT
        while time.monotonic() < deadline:
            rival = self.fork(arms=[[place, "gate"] for place in held])
            event = rival.hear()
            if event is not None and event["event"] == "reached":
                return rival
            if event is None or event["event"] != "done" or event["status"] < 400:
                raise ImpossibleError(f"no rival could be held: {event}")
            if event["code"] == "idempotency_outcome_unknown":
                # Under SERIALIZABLE the server may refuse the rival's handler because of another cell. It is parked
                # then, and no rival can win: the cell is void, and runs again.
                self.verdict.fired = False
                raise ImpossibleError(f"the rival was parked: {event}")
            self.answers.append(event)
            self.end_lease()
        raise ImpossibleError(f"P7: no rival won within {LIMIT:g} s; the last one was answered {event}")

    def sweep(self):
        """P7: after its lease and one sweep nothing is a claim any more."""
        self.end_lease()
        swept = self.answered(self.fork("sweep"))
        record = self.observer.record(self.operation)
        if record is not None and record["status"] == "in_progress":
            self.problem(f"P7: still a claim after its lease and a sweep, which said {swept}: {record}")

    # The purge's cell

    def purge(self):
        """Records past retention: one that is done, and claims, live and abandoned, that no purge may touch."""
        cell = self.cell
        self.prepare()
        kept = [f"{self.key}-abandoned", f"{self.key}-live"]
        self.kill_at("handler.before", key=kept[0])
        self.observer.end_lease(self.operation)
        if cell.declaration == "park":
            kept.append(f"{self.key}-parked")
            self.kill_at("handler.before", key=kept[-1])
            self.observer.end_lease(self.operation, kept[-1])
            self.ask(key=kept[-1])
        self.kill_at("handler.before", key=kept[1])
        self.observer.end_retention(self.operation)
        before = [self.observer.record(self.operation, key) for key in kept]
        victim = self.start_victim()
        payouts, expected = len(self.payouts()), None
        if cell.fault == "kill":
            self.bury(victim)
        elif cell.fault == "stop":
            victim.wait_until_stopped()
            self.answered(self.fork("purge"))
            if self.spec.get("wanted"):
                # Past its retention the key is a new request, whatever a frozen purge holds.
                self.converge()  # which may sweep first, and so settle the abandoned claims that the purge has to keep
                before = [self.observer.record(self.operation, key) for key in kept]
                payouts += not self.deduplicate
                expected = "completed"
            victim.wake()
            victim.go()
            self.answered(victim)
        else:
            self.answered(victim)
        for _ in range(3):
            self.answered(self.fork("purge"))
        record = self.observer.record(self.operation, self.key)
        if (record and record["status"]) != expected:
            self.problem(f"after the purge was run again the record should be {expected or 'gone'}: {record}")
        if before != [self.observer.record(self.operation, key) for key in kept]:
            self.problem(f"P7: the purge touched a claim or a parked record: {before}")
        if len(self.payouts()) != payouts:
            self.verdict.doubled = 1
            self.problem(f"P1: {len(self.payouts())} payouts in place of {payouts}")
