"""One cell: break a process at a place, let new processes recover, and judge the effects of all of them.

The effects are read from the ledger and the database.
"""

import itertools
import threading
import time
import zlib
from contextlib import contextmanager, nullcontext
from uuid import uuid4

from testproject.harness.effects import judge_effects
from tests.crash.judging import HOUR, Judged, Verdict
from tests.crash.observer import observing
from tests.crash.points import LATE_CALL, OF_A_SWEEP, OF_RECONCILING, OF_RELEASING, WITH_ROWS, blocks_everybody
from tests.harness.answers import KEPT, KINDS, facts_of
from tests.harness.history import Call
from tests.harness.zygote import ImpossibleError, wait_until

#: How long new processes try to get the outcome, in seconds. The longest wait is for an owner that is frozen in the
#: transaction that locks the record: the database ends that session after five seconds.
LIMIT = 60.0
#: A lease, in seconds, whose end a cell waits for in real time.
SHORT_LEASE = 0.5
#: The cap of the heartbeats, in seconds. The first heartbeat is broken.
HEARTBEAT = 10.0

#: Two purges at once would purge each other's records.
PURGING = threading.Lock()

_numbers = itertools.count(1)


@contextmanager
def running(world, cell, **spec):
    """Start a cell. Its processes end with the block.

    :param spec: added to every worker's specification.
    """
    with observing(world, f"crash.{next(_numbers)}-{cell}") as observer:
        run = Run(world, cell, observer, spec)
        try:
            yield run
        finally:
            run.end()


def run_cell(world, cell, **spec):
    with PURGING if cell.point == "purge.selected" else nullcontext(), running(world, cell, **spec) as run:
        try:
            run.play()
        except (ImpossibleError, TimeoutError) as error:
            run.problem(str(error))
    if not run.verdict.fired:
        run.problem("the fault never fired")
    return run.verdict


class Run(Judged):
    """The processes of one cell, and the responses to their callers."""

    def __init__(self, world, cell, observer, spec):
        self.world = world
        self.cell = cell
        self.observer = observer
        self.operation = observer.operation
        self.key = f"key-{self.operation}"
        self.spec = spec
        self.verdict = Verdict(cell)
        self.provider = world.providers[cell.declaration in {"again", *WITH_ROWS}]
        #: The responses to callers, in the order of their requests.
        self.answers = []
        #: A call without an answer for each process that may run the operation, and the ids of the broken ones.
        self.calls, self.broken = [], set()
        self._workers = []
        # Derived from the cell and its seed: how the record is prepared, whether a sweep comes first, and the answer of
        # each attempt.
        self.draw = zlib.crc32(" ".join(cell.kind).encode()) + cell.seed
        self.coin = self.draw % 2 == 0
        # After a rollback nothing is locked, and on_commit is not called.
        may_undo = cell.declaration in WITH_ROWS and cell.point != "on_commit" and not spec.get("without_begin")
        self.kinds = list(KINDS) if may_undo and not blocks_everybody(cell, world.database) else KEPT
        self.bystanders = {}

    # Processes

    def fork(self, job="request", **spec):
        call = Call(id=uuid4().hex, key=self.key, start=time.monotonic())
        if "key" not in spec and "operation" not in spec:
            self.calls.append(call)
        if "arms" in spec:
            self.broken.add(call.id)
        worker = self.world.zygote.fork(
            **{
                "job": job,
                "call": call.id,
                "declaration": self.cell.declaration,
                "operation": self.operation,
                "key": self.key,
                "provider": self.provider.url,
                "pooled": self.world.pooler is not None,
                "answers": self.kinds,
                "draw": self.draw,
                "database": None if self.observer.path is None else str(self.observer.path),
                **self.spec,
                **spec,
            }
        )
        self._workers.append(worker)
        self.verdict.processes += 1
        return worker

    def end(self):
        """Kill the remaining workers, even if they are held or frozen."""
        for worker in self._workers:
            worker.end()

    def ask(self, **spec):
        """Send a request from a new process."""
        return self.answered(self.fork(**spec))

    def answered(self, worker):
        event = worker.expect("done")
        worker.hear()
        if "status" in event:
            self.answers.append(event)
        return event

    def kill_at(self, point, **spec):
        worker = self.fork(arms=[[point, "kill"]], **spec)
        worker.expect("reached")
        self.bury(worker)

    def bury(self, worker):
        """Wait until a killed process and its database sessions are gone."""
        if worker.hear() is not None:
            raise ImpossibleError("a killed process is still running")
        self.observer.wait_until_gone()

    def converge(self):
        """Send requests from new processes until one gets the outcome."""
        deadline = time.monotonic() + LIMIT
        while time.monotonic() < deadline:
            answer = self.ask()
            if facts_of(answer["body"]) or answer["code"] == "idempotency_outcome_unknown":
                return
            if answer["status"] not in {409, 500, 503}:
                raise ImpossibleError(f"unexpected answer: {answer}")
            self.end_lease()
        raise ImpossibleError(f"P7: no process got the outcome within {LIMIT:g} s; the last answer was {answer}")

    # Breaking

    def prepare(self):
        """Bring the record into a state from which the cell's point can be reached."""
        cell = self.cell
        if cell.point in {"replay.read", "purge.selected"}:
            self.ask()
        if (
            cell.point in (*OF_A_SWEEP, *OF_RECONCILING, "takeover.sent")
            or (cell.point in OF_RELEASING and cell.declaration == "ask")
        ):  # fmt: skip
            # With or without an effect. A sweep releases only an operation that was certainly not executed.
            unpaid = self.coin or cell.point in OF_RELEASING or cell.fault == "stop-live"
            self.kill_at("handler.before" if unpaid else "downstream.answered")
            self.observer.end_lease(self.key)

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
            self.observer.end_session(event["session"])
            victim.go()
        if cell.point == "downstream.sent":
            # The call is on its way, and the provider guarantees to handle it within the lease.
            wait_until(self.payouts, "the provider receives the call")
        return victim

    @property
    def waits_by_the_real_clock(self):
        """The provider refuses a frozen process's call after its lease. A test can't move the provider's clock."""
        cell = self.cell
        return cell.declaration == "ask" and cell.point in LATE_CALL and cell.fault.startswith("stop")

    def end_lease(self):
        if self.waits_by_the_real_clock:
            wait_until(lambda: self.observer.lease_is_over(), "the lease ends")
        else:
            self.observer.end_lease(self.key)

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
        self.start_bystanders()
        self.prepare()
        victim = self.start_victim()
        if cell.fault == "kill":
            self.bury(victim)
            record = self.observer.record(self.key)
            if cell.declaration in {"ask", "park"} and record and record["status"] == "in_progress":
                self.observer.end_retention()  # which does not end what is unknown
        elif cell.fault in {"raise", "drop"}:
            self.answered(victim)
        else:
            self.freeze(victim)
        if not cell.fault.startswith("stop") and self.coin:
            self.sweep()
        self.converge()
        self.end_bystanders()
        self.judge()

    def start_bystanders(self):
        """Make two claims that the cell must not touch: of another key, and of another operation with the same key."""
        if self.spec.get("level") == "SERIALIZABLE":
            return  # the server may refuse their handlers because of the cell
        for spec in ({"key": f"{self.key}-other"}, {"operation": f"{self.operation}-other"}):
            label = f"{self.key}-bystander-{len(self.bystanders)}"
            bystander = self.fork(
                arms=[["claim.committed", "gate"]], session="bystander", lease=HOUR, label=label, **spec
            )
            bystander.expect("reached")
            self.bystanders[label] = bystander

    def end_bystanders(self):
        """Let the bystanders continue. Each must reach its outcome at its first attempt."""
        for label, bystander in self.bystanders.items():
            bystander.go()
            event = bystander.expect("done")
            bystander.hear()
            facts = facts_of(event.get("body", "")) or {}
            if facts.get("attempt") != 1:
                self.problem(f"P6: another key's or operation's claim was touched: {event}")
            elif examples := judge_effects(effects := self.effects(label, facts), effects).examples:
                self.problem(f"P1, P2: effects of another key or operation: {examples}")

    def freeze(self, victim):
        """The victim sleeps past its lease while another attempt wins, then continues."""
        cell = self.cell
        victim.wait_until_stopped()
        self.end_lease()
        rival = None
        before = None
        if blocks_everybody(cell, self.world.database):
            for answer in (self.ask(), self.ask()):
                if facts_of(answer["body"]):
                    self.problem(f"another attempt ran while the file was locked: {answer}")
        elif cell.fault == "stop":
            self.converge()
        else:
            rival = self.start_rival()
            before = self.observer.record(self.key)
        victim.wake()
        victim.go()
        self.answered(victim)
        if rival is not None:
            after = self.observer.record(self.key)
            if before != after:
                self.problem(f"P6: a stale attempt changed its rival's live claim from {before} to {after}")
            rival.go()
            self.answered(rival)

    def overlap(self):
        """Not a fault: processes whose clocks are an hour fast or slow send requests while the claim's owner lives."""
        owner = self.fork(arms=[[self.cell.point, "gate"]])
        owner.expect("reached")
        self.verdict.fired = True
        before = self.observer.record(self.key)
        for skew in (HOUR, -HOUR):
            answer = self.ask(skew=skew)
            if answer["code"] != "idempotency_in_progress":
                self.problem(f"a process with a wrong clock ignored a live claim: {answer}")
        self.answered(self.fork("sweep", skew=HOUR))
        after = self.observer.record(self.key)
        if before != after:
            self.problem(f"P6: a live claim was changed from {before} to {after}")
        owner.go()
        self.answered(owner)
        self.converge()
        self.judge()

    def start_rival(self):
        """Start another attempt, which wins and is held before it ends."""
        # The seed decides where it is held. Every attempt that runs reaches the last point of each tuple. If the payout
        # was made, the reconciler finds it and nothing runs, so the rival is held before the reconciler.
        places = [("handler.wrote",), ("reconcile.before", "handler.wrote"), ("step.started", "render.before")]
        held = (*places[0], "reconcile.before") if self.payouts() else places[self.cell.seed % 3]
        deadline = time.monotonic() + LIMIT
        while time.monotonic() < deadline:
            rival = self.fork(arms=[[place, "gate"] for place in held])
            event = rival.hear()
            if event is not None and event["event"] == "reached":
                return rival
            if event is None or event["event"] != "done" or facts_of(event["body"]):
                raise ImpossibleError(f"no rival could be held: {event}")
            if event["code"] == "idempotency_outcome_unknown":
                # Under SERIALIZABLE the server may refuse the rival's handler because of another cell. The rival is
                # then parked, so no rival can win, and the cell runs again.
                self.verdict.fired = False
                raise ImpossibleError(f"the rival was parked: {event}")
            self.answers.append(event)
            self.end_lease()
        raise ImpossibleError(f"P7: no rival won within {LIMIT:g} s; the last one was answered {event}")

    def sweep(self):
        """P7: after the lease and one sweep, no claim is left."""
        self.end_lease()
        swept = self.answered(self.fork("sweep"))
        record = self.observer.record(self.key)
        if record is not None and record["status"] == "in_progress":
            self.problem(f"P7: a claim is left after its lease and a sweep, which reported {swept}: {record}")

    # The purge's cell

    def purge(self):
        """Records past retention: a completed one, and a live and an abandoned claim, which no purge may touch."""
        cell = self.cell
        self.prepare()
        kept = [f"{self.key}-abandoned", f"{self.key}-live"]
        self.kill_at("handler.before", key=kept[0])
        self.observer.end_lease()
        self.kill_at("handler.before", key=kept[1])
        self.observer.end_retention()
        before = [self.observer.record(key) for key in kept]
        victim = self.start_victim()
        payouts, expected = len(self.payouts()), None
        if cell.fault == "kill":
            self.bury(victim)
        elif cell.fault == "stop":
            victim.wait_until_stopped()
            self.answered(self.fork("purge"))
            if self.spec.get("wanted"):
                # Past its retention the key starts a new request, even while a frozen purge holds locks.
                self.converge()
                before = [self.observer.record(key) for key in kept]
                payouts += self.provider is self.world.providers[False]
                expected = "completed"
            victim.wake()
            victim.go()
            self.answered(victim)
        else:
            self.answered(victim)
        for _ in range(3):
            self.answered(self.fork("purge"))
        record = self.observer.record(self.key)
        if (record and record["status"]) != expected:
            self.problem(f"after the purge was run again the record should be {expected or 'gone'}: {record}")
        if before != [self.observer.record(key) for key in kept]:
            self.problem(f"P7: the purge touched a claim: {before}")
        if len(self.payouts()) != payouts:
            self.verdict.doubled = 1
            self.problem(f"P1: {len(self.payouts())} payouts instead of {payouts}")
