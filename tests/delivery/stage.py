"""The stage for every fault's script: a broker alongside the harness's world, and access to both.

Counts are read through connections that are independent of the package.
"""

import tempfile
import time
from collections import Counter
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from uuid import uuid4

from kombu import Connection

from testproject.harness.marks import Marks
from testproject.harness.redis import Redis, redelivering, running_redis
from tests.delivery import names
from tests.harness.keeper import Keeper
from tests.harness.rabbitmq import Rabbit, running_rabbitmq
from tests.harness.world import LONG_AGO, Database, World, world
from tests.harness.zygote import ImpossibleError

BROKERS = {"redis": running_redis, "rabbitmq": running_rabbitmq}
#: The default visibility timeout on Redis, in seconds. It is far longer than any script.
VISIBILITY = 600.0


@dataclass(frozen=True)
class Stage:
    """One broker and one database, on which the scripts run one after the other."""

    broker: Redis | Rabbit
    world: World
    database: Database


class Scene:
    """The names, queue, marks and processes of one script."""

    def __init__(self, stage, name, count, *, deduplicate=False, **defaults):
        """:param count: the number of messages of each kind."""
        self.broker, self.database = stage.broker, stage.database
        self.name = f"{name}-{uuid4().hex[:6]}"
        self.count = count
        self._directory = tempfile.TemporaryDirectory(prefix="delivery-marks-")
        self.marks = Marks(self._directory.name)
        self._zygote, self._log = stage.world.zygote, stage.world.log
        self._provider = stage.world.providers[deduplicate]
        self._defaults = defaults
        #: How often the workers have lost the broker or the connection to it.
        self.outages = 0
        self._processes = []
        self._keepers = []
        self._log_offset = self._log.stat().st_size

    def labels(self, kind, numbers=None):
        """The labels of messages of a kind; by default of all."""
        return [f"{self.name}-{kind}-{number:05d}" for number in (range(self.count) if numbers is None else numbers)]

    # Processes

    def spec(self, role, *strikes, **more):
        options = {**self._defaults, **more}
        visibility = options.pop("visibility", VISIBILITY)
        transport = {"confirm_publish": True}
        if isinstance(self.broker, Redis):
            transport = {**redelivering(visibility, look_every=0.2), "unacked_restore_limit": 1000}
        return {
            "role": role,
            "name": self.name,
            "queue": self.name,
            "broker": self.broker.url,
            "transport": transport,
            "provider": self._provider.url,
            "marks": str(self.marks.directory),
            "strikes": [asdict(strike) for strike in strikes],
            "sender": names.ONCE,
            **options,
        }

    def start(self, role, *strikes, **more):
        process = self._zygote.fork(**self.spec(role, *strikes, **more))
        self._processes.append(process)
        return process

    def run(self, role, **more):
        """Start a process, wait until it has done its work, and return its report."""
        return self.start(role, **more).expect("done")

    def publish(self, **more):
        """Run the operations that publish all messages."""
        self.run("producer", numbers=[0, self.count], **more)

    def start_workers(self, *strikes, count=2, **more):
        """Start workers that are restarted when they die."""
        spec = self.spec("worker", *strikes, **more)
        keeper = Keeper(
            *(partial(self._zygote.fork, **spec) for _ in range(count)),
            killed=lambda: self.marks.count("main.*") + self.marks.count("group.*"),
            outages=lambda: self.outages,
        )
        self._keepers.append(keeper)
        return keeper

    def start_relay(self, *strikes, **more):
        process = self.start("relay", *strikes, **more)
        process.expect("ready")
        process.go()
        return process

    def finish(self, relay):
        """Let a relay end when nothing is due, and return how many messages it has sent."""
        relay.go()
        return relay.expect("done")["sent"]

    def relay_all(self, **more):
        """Relay until all messages are sent, including those that other relays have taken."""
        relay = self.start_relay(**more)
        self.until(lambda: not self.unsent(), "the outbox is empty", meanwhile=partial(self.back_date, "next_try_at"))
        return self.finish(relay)

    def close(self):
        for keeper in self._keepers:
            for process in keeper.started:
                process.end(leftovers=True)  # the children of a killed main process are in its group
        for process in self._processes:
            process.end()
        # A failed script leaves messages, which must not make later scripts fail.
        self.database.query("DELETE FROM idempotency_outbox_message WHERE status <> 'sent'")
        forget(self.broker)
        self._directory.cleanup()

    # The database's clock, moved by back-dating

    def back_date(self, column):
        """Let the leases of all relays end, ``lease_expires_at``, or their pauses, ``next_try_at``."""
        late = f"UPDATE idempotency_outbox_message SET {column} = %s WHERE status = 'pending' AND {column} > now()"
        self.database.query(late, LONG_AGO)

    # Observing

    def until(self, condition, what, *, meanwhile=lambda: None, limit=60.0, pause=0.02):
        """Wait until ``condition`` holds, at most until ``limit`` seconds after the last progress.

        :raises ImpossibleError: nothing progresses any more, or a worker keeps ending by itself.
        """
        last, progress = time.monotonic(), None
        while not (found := condition()):
            meanwhile()
            if complaint := self.complaint():
                raise ImpossibleError(f"{complaint}\n{self.log()[-6000:]}")
            if (seen := (self.deliveries(), self.unsent(), self.marks.count("*"))) != progress:
                last, progress = time.monotonic(), seen
            if time.monotonic() > last + limit:
                raise ImpossibleError(f"{what}: no progress for {limit:g} s\n{self.log()[-6000:]}")
            time.sleep(pause)  # polls, because other processes have no event to wait for
        return found

    def complaint(self):
        """Why the workers can't be relied on, or an empty text."""
        return "; ".join(f"A worker {words}" for keeper in self._keepers if (words := keeper.complaint()))

    def log(self):
        """The output of the script's processes."""
        return self._log.read_bytes()[self._log_offset :].decode(errors="replace")

    def unsent(self):
        return self.database.count("SELECT count(*) FROM idempotency_outbox_message WHERE status = 'pending'")

    def deliveries(self):
        """How often messages have reached a task."""
        return len(self.marks.notes("deliveries"))

    def deliveries_of(self, kind):
        return Counter(label for label in self.marks.notes("deliveries") if label.startswith(f"{self.name}-{kind}-"))

    def rows(self, kind):
        """The number of rows by message."""
        return self.database.transfers(f"{self.name}-{kind}")

    def payouts(self, kind):
        """The number of the provider's payouts by message."""
        return self._provider.payouts(f"{self.name}-{kind}")

    def settle(self, meanwhile=lambda: None):
        """Wait until no message is unsent, queued or with a worker.

        The broker counts a message until a worker acknowledges it. The check is made twice, because kombu removes a
        message from a Redis list a moment before it stores it as unacknowledged.
        """
        calm = []

        def idle():
            if self.unsent() or self.broker.count(self.name):
                calm.clear()
                return False
            calm.append(self.deliveries())
            return len(calm) > 1 and calm[-1] == calm[-2]

        # Less often, because each query of a broker takes a connection.
        self.until(idle, "all messages are consumed", meanwhile=meanwhile, pause=0.1)

    def resend_lost_messages(self):
        """Send protected messages again that the broker confirmed and that never reached their inbox, until all have.
        Returns how many there were.
        """
        sent_again = 0
        while missing := self._without_record():
            # The older a message is, the longer the next resend waits, so the messages are aged each time.
            self.database.query(
                "UPDATE idempotency_outbox_message "
                "SET created_at = (created_at AT TIME ZONE 'UTC' - interval '1 hour') AT TIME ZONE 'UTC', "
                "sent_at = (sent_at AT TIME ZONE 'UTC' - interval '1 hour') AT TIME ZONE 'UTC' "
                "WHERE payload ->> 'label' LIKE %s",
                f"{self.name}-%",
            )
            found = self.run("resender")["found"]
            if found < missing:
                raise ImpossibleError(f"{missing} messages have no record, but only {found} were found")
            sent_again += found
            self.settle()
        return sent_again

    def _without_record(self):
        # Citus joins no distributed table with a local one, so this takes two queries.
        known = set(
            self.database.query("SELECT idempotency_key FROM idempotency_record WHERE operation = %s", names.KEPT)
        )
        keys = self.database.query(
            "SELECT idempotency_key FROM idempotency_outbox_message WHERE topic = %s AND payload ->> 'label' LIKE %s",
            names.KEPT,
            f"{self.name}-%",
        )
        return sum(key not in known for key in keys)

    def dead_letters(self):
        """Empty the dead-letter queue, and return the headers of each message."""
        found = []
        with Connection(self.broker.url) as connection:
            queue = connection.SimpleQueue(names.DEAD)
            while True:
                try:
                    message = queue.get(block=False)
                except queue.Empty:
                    break
                found.append(message.headers)
                message.ack()
            queue.close()
        return found


def forget(broker):
    """Delete messages that no worker consumes: nudges, and those that a failed script has left."""
    if isinstance(broker, Redis):
        with broker.client() as client:
            client.flushall()
        return
    # Each script has a separate queue, so messages left there disturb no other script.
    with Connection(broker.url) as connection, connection.channel() as channel:
        channel.queue_delete(names.NUDGES)


@contextmanager
def stage(broker_name, url=None):
    """Start everything; ``url`` as for ``world``."""
    with (
        BROKERS[broker_name]() as broker,
        world("tests.delivery.roles", url) as shared,
        closing(Database(shared.url)) as database,
    ):
        yield Stage(broker, shared, database)
