"""One script for each delivery failure. Each returns how often it struck.

Unless a script says otherwise, every operation publishes two messages through the outbox, one to the protected task and
one to its control, and the same workers consume both under the same fault.
"""

import json
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass

from testproject.harness.redis import Redis
from tests.delivery import names, tally
from tests.delivery.stage import Scene
from tests.delivery.tally import Verdict, judge
from tests.harness.proxy import Proxy
from tests.harness.strikes import Strike, held
from tests.harness.world import LONG_AGO

#: For how many seconds of real time a killed worker's claim blocks the next delivery.
LEASE = 2.0


@dataclass(frozen=True)
class Fault:
    script: Callable[[Scene, Verdict], None]
    #: The count of the control that must not be zero. Empty if the control can show nothing.
    control: str = "doubled"
    #: Runs are interrupted, so only a provider that deduplicates by key can pay once.
    deduplicate: bool = False


def run(stage, name, messages, **defaults):
    """Run a script with ``messages`` of each kind. ``defaults`` are part of every process's specification."""
    fault, verdict = FAULTS[name], Verdict(name, stage.broker.name)
    started = time.monotonic()
    with closing(Scene(stage, name, messages, deduplicate=fault.deduplicate, **defaults)) as scene:
        fault.script(scene, verdict)
        verdict.expect(not scene.complaint(), scene.complaint())
    verdict.seconds = time.monotonic() - started
    if fault.control:
        verdict.expect(
            getattr(verdict.plain, fault.control), f"the control counts 0 {fault.control}, so the test proves nothing"
        )
    return verdict


def consume(scene, verdict, *strikes, meanwhile=lambda: None, **options):
    """Workers under strikes consume all messages, which a relay sends while the workers start.

    kombu removes a message from Redis' list before it stores it as unacknowledged. If the worker's main process or the
    server dies in between, the message is lost, and it is sent again. RabbitMQ must lose none.
    """
    keeper = scene.start_workers(*strikes, **options)
    relay = scene.start_relay()
    scene.publish()
    scene.settle(meanwhile=meanwhile)
    verdict.lost_by_broker = scene.resend_lost_messages()
    if not isinstance(scene.broker, Redis):
        verdict.expect(not verdict.lost_by_broker, f"the broker has lost {verdict.lost_by_broker} messages")
    scene.finish(relay)
    return keeper


def consume_outbox(scene, **options):
    """Workers consume all messages, which are published before any is sent."""
    scene.start_workers()
    scene.publish(**options)
    scene.relay_all()
    scene.settle()


def one_in(scene, share, least=2):
    """Strike one in this many messages: in ``share``, or in fewer, so that at least ``least`` are struck."""
    return max(1, min(share, scene.count // least))


def struck_by(act, place, share, **options):
    """A script in which a worker's process is killed at a place by one message in ``share``."""

    def script(scene, verdict):
        every = one_in(scene, share)
        # Protected messages and the control's are struck far apart. A process that dies interrupts the other messages
        # of its worker, and a message that was just committed has no second run to strike.
        kept = Strike(place, act, every=every, among="-kept-")
        plain = Strike(place, act, every=every, offset=every // 2, among="-plain-")
        keeper = consume(scene, verdict, kept, plain, lease=LEASE, **options)
        verdict.struck = scene.marks.count(f"{act}.*")
        verdict.expect(scene.marks.count(f"{act}.*-kept-*"), "no protected message was struck")
        if act != "child":
            verdict.expect(keeper.restarts, "no dead main process was detected")
        judge(scene, verdict)

    return script


def redelivered_while_it_runs(scene, verdict):
    """Redis: the visibility timeout is shorter than the task. RabbitMQ: the connection is lost, and the delivery with
    it. In both, the message is delivered again while its first run continues to its end.
    """
    fault = Strike("handler", "hold", every=one_in(scene, 100))
    if isinstance(scene.broker, Redis):
        # Enough children for held messages and for their second deliveries, which release them.
        release = release_each(scene, lambda label: scene.deliveries_of(label.split("-")[-2])[label] > 1)
        consume(scene, verdict, fault, meanwhile=release, visibility=1.0, concurrency=6)
    else:
        with Proxy(scene.broker.url) as proxy:

            def cut(label):
                scene.outages += 1
                return proxy.cut()

            consume(scene, verdict, fault, meanwhile=release_each(scene, cut), broker=proxy.url)
    verdict.struck = scene.marks.count("go.*")
    judge(scene, verdict)


def release_each(scene, may_go):
    """A function that releases each held message for which ``may_go`` returns a truthy value."""

    def release():
        for label in held(scene.marks):
            if may_go(label):
                scene.marks.leave(f"go.{label}")

    return release


def published_twice(scene, verdict):
    consume_outbox(scene, sender=names.TWICE)
    verdict.struck = scene.count
    judge(scene, verdict)
    verdict.expect(verdict.kept.deliveries >= 2 * scene.count, "not every message was delivered twice")
    verdict.expect(verdict.plain.doubled == scene.count, "not every message took effect twice without protection")


def confirm_lost(scene, verdict):
    """The broker confirms the message, but the connection breaks before the relay receives the confirm."""
    scene.start_workers()
    scene.publish()
    with Proxy(scene.broker.url, lambda number: number % 4 == 0) as proxy:
        scene.relay_all(broker=proxy.url)
        scene.settle()
        verdict.struck = proxy.swallowed
    judge(scene, verdict)


def relay_killed(scene, verdict):
    """Relays are killed between the broker's confirm and marking the message as sent."""
    scene.start_workers()
    scene.publish()
    times = max(3, scene.count // 50)
    fault = Strike("relay.published", "child", every=7, times=times)
    while scene.marks.count("child.relay.*") < times and scene.unsent():
        relay = scene.start_relay(fault, batch_size=20)
        scene.until(lambda relay=relay: not relay.alive or not scene.unsent(), "a relay dies or has sent everything")
        if relay.alive:
            scene.finish(relay)
        scene.back_date("lease_expires_at")
    scene.relay_all()
    scene.settle()
    verdict.struck = scene.marks.count("child.relay.*")
    judge(scene, verdict)


def relay_frozen(scene, verdict):
    """Relays freeze with a batch each. Their leases end, others send everything, and then they wake and send it too."""
    scene.start_workers()
    scene.publish()
    frozen = []
    for number in range(1, max(2, scene.count // 100) + 1):
        relay = scene.start_relay(Strike("relay.claimed", "freeze", times=number), batch_size=10)
        relay.wait_until_stopped()
        frozen.append(relay)
    verdict.struck = scene.marks.count("freeze.*")
    scene.back_date("lease_expires_at")
    scene.relay_all()
    for relay in frozen:
        relay.wake()
    for relay in frozen:
        scene.finish(relay)
    scene.settle()
    judge(scene, verdict)


def relays_at_once(scene, verdict):
    """Four relays share one backlog. No message is even published twice."""
    scene.start_workers()
    scene.publish()
    # Each waits with its first batch, so that none sends everything before the others have begun.
    first = Strike("relay.claimed", "hold", times=4)
    relays = [scene.start_relay(first, batch_size=5) for _ in range(first.times)]
    scene.until(lambda: scene.marks.count("hold.*") == first.times, "each relay has a batch")
    scene.marks.leave(f"go.{first.place}")
    scene.until(lambda: not scene.unsent(), "the outbox is empty")
    sent = [scene.finish(relay) for relay in relays]
    scene.settle()
    verdict.struck = sum(number > 0 for number in sent)
    verdict.expect(verdict.struck == first.times, f"not every relay has sent messages: {sent}")
    verdict.expect(sum(sent) == 2 * scene.count, f"{sum(sent)} messages were marked, of {2 * scene.count}")
    judge(scene, verdict)
    for found in (verdict.kept, verdict.plain):
        verdict.expect(found.deliveries == scene.count, f"{found.deliveries} deliveries of {scene.count} messages")


def producer_rolled_back(scene, verdict):
    """Of four operations, one is rolled back for good, and one is rolled back and retried. The control publishes
    without an outbox. Other operations commit so late that messages with higher ids are sent first.
    """
    scene.start_workers()
    late = scene.labels("kept", range(90_000, 90_000 + max(2, scene.count // 100)))
    writers = [scene.start("late producer", label=label) for label in late]
    written = [writer.expect("written")["id"] for writer in writers]
    relay = scene.start_relay()
    scene.publish(rolled_back=True)
    scene.until(lambda: not scene.unsent(), "all committed messages are sent")
    highest = scene.database.count("SELECT max(id) FROM idempotency_outbox_message WHERE status = 'sent'")
    skipped = sum(number < highest for number in written)
    for writer in writers:
        writer.go()
        writer.expect("done")
    scene.settle()
    scene.finish(relay)
    verdict.struck = scene.marks.count("rollback.*")
    verdict.expect(skipped == len(late), "a late message has a higher id than all sent messages")
    committed = [number for number in range(scene.count) if number % 4]
    judge(scene, verdict, scene.labels("kept", committed) + late, scene.labels("plain", committed))


def broker_restarted(scene, verdict):
    """The broker is killed under load, with messages queued and running. While it is down, a task ends whose message
    can't be acknowledged. When the workers have failed to reach the broker, it is started again with its data on disk.
    """
    restarts = max(1, min(5, scene.count // 300))
    workers = 2
    broker = scene.broker

    def restart(label):
        failures = scene.log().count("Cannot connect to")
        scene.outages += 1
        broker.kill()
        scene.marks.leave(f"go.{label}")
        scene.until(lambda: label in scene.rows(label.split("-")[-2]), f"{label} is committed")
        scene.until(
            lambda: scene.log().count("Cannot connect to") >= failures + workers,
            "the workers detect that the broker is down",
        )
        broker.start()
        return True

    fault = Strike("handler", "hold", every=scene.count // restarts)
    consume(scene, verdict, fault, meanwhile=release_each(scene, restart), count=workers, visibility=3.0)
    verdict.struck = scene.marks.count("go.*")
    judge(scene, verdict)


def other_payload(scene, verdict):
    """Each protected message is published again under its id with another amount. One of the two is dead-lettered."""
    consume_outbox(scene)
    sent = scene.database.query(
        "SELECT topic, payload ->> 'label', message_id::text, idempotency_key, account_id "
        "FROM idempotency_outbox_message WHERE payload ->> 'label' LIKE %s",
        f"{scene.name}-%",
    )
    calls = [
        (
            topic,
            {"label": label, "amount": 2},
            {"task_id": message_id, "headers": {"idempotency_key": key, "idempotency_account": account}},
        )
        for topic, label, message_id, key, account in sent
    ]
    path = scene.marks.directory / "calls"
    path.write_text(json.dumps(calls))
    scene.run("caller", calls=str(path))
    scene.settle()
    verdict.struck = scene.count
    judge(scene, verdict, dead_letters=scene.count)


def poison(scene, verdict):
    """Each run of these messages kills the worker's child. The control's are let through after the sixth run, because
    nothing else would end them.
    """
    every, most = one_in(scene, 50), 6
    consume(scene, verdict, Strike("begin", "child", every=every, times=most), lease=LEASE)
    poisonous = [number for number in range(scene.count) if number % every == 0]
    others = [number for number in range(scene.count) if number % every]
    runs = {label: scene.marks.count(f"child.{label}.*") for label in scene.labels("kept", poisonous)}
    verdict.struck = sum(runs.values())
    verdict.expect(set(runs.values()) == {names.MAX_ATTEMPTS}, f"poison ran {sorted(set(runs.values()))} times")
    unbounded = scene.marks.count("child.*-plain-*")
    verdict.expect(unbounded == most * len(poisonous), f"the control's poison ran {unbounded} times")
    judge(scene, verdict, scene.labels("kept", others), dead_letters=len(poisonous), cut_off=len(poisonous))


def forgotten(scene, verdict):
    """All messages are delivered again much later. The records of the second half are purged by then, as if their
    retention were shorter than the broker's longest redelivery. That half serves as the control.
    """
    consume_outbox(scene)
    gone = scene.labels("kept", range(scene.count // 2, scene.count))
    scene.database.query(
        "UPDATE idempotency_record SET expires_at = %s WHERE operation = %s AND idempotency_key IN ("
        "SELECT idempotency_key FROM idempotency_outbox_message WHERE payload ->> 'label' = ANY(%s))",
        LONG_AGO,
        names.KEPT,
        gone,
    )
    verdict.struck = scene.run("purger")["deleted"]
    scene.database.query(
        "UPDATE idempotency_outbox_message SET status = 'pending' WHERE payload ->> 'label' LIKE %s",
        f"{scene.name}-kept-%",
    )
    scene.relay_all()
    scene.settle()
    others = scene.labels("kept", range(scene.count // 2))
    judge(scene, verdict, others, leave_out=gone)
    verdict.plain = tally.count(scene, "kept", gone, leave_out=others)
    verdict.expect(verdict.plain.doubled == len(gone), "not every forgotten message took effect twice")


FAULTS = {
    "child-killed": Fault(struck_by("child", "handler", 20), deduplicate=True),
    "main-killed": Fault(struck_by("main", "handler", 50, visibility=3.0), deduplicate=True),
    "group-killed": Fault(struck_by("group", "committed", 50, visibility=3.0), deduplicate=True),
    "after-commit": Fault(struck_by("child", "committed", 20)),
    "redelivered": Fault(redelivered_while_it_runs),
    "published-twice": Fault(published_twice),
    "confirm-lost": Fault(confirm_lost),
    "relay-killed": Fault(relay_killed),
    "relay-frozen": Fault(relay_frozen),
    "relays-at-once": Fault(relays_at_once, control=""),
    "rolled-back": Fault(producer_rolled_back, control="ghosts"),
    "broker-restarted": Fault(broker_restarted),
    "other-payload": Fault(other_payload),
    "poison": Fault(poison, control=""),
    "forgotten": Fault(forgotten),
}
