"""What every fault's script runs on: a broker, a database, two providers, the zygote, and how they are looked into.

What is counted is read through connections that know nothing of the package.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

from testproject.provider import read_ledger, running_provider
from tests.contrib.brokers import Broker, RabbitNode, RedisServer
from tests.crash.arena import LONG_AGO, ImpossibleError, Zygote, migrate, own_database
from tests.delivery import names
from tests.delivery.processes import Keeper, Process, zygote_of_processes
from tests.delivery.strikes import Marks

BROKERS = ("redis", "rabbitmq")
#: Seconds after which Redis delivers a message again that nobody has acknowledged, in scripts that don't say otherwise.
#: Far longer than any of them.
VISIBILITY = 600.0


class Stage:
    """One broker and one database, on which one script runs after the other."""

    def __init__(
        self, broker: Broker, url: str, zygote: Zygote[Process], providers: dict[bool, tuple[Path, str]], log: Path
    ):
        import psycopg

        self.broker = broker
        self.zygote = zygote
        self._providers = providers
        self._log = log
        self._connection: Any = psycopg.connect(url, autocommit=True)

    def close(self) -> None:
        self._connection.close()

    def query(self, statement: str, *parameters: Any) -> list[tuple[Any, ...]]:
        cursor = self._connection.execute(statement, parameters)
        return [] if cursor.description is None else list(cursor.fetchall())

    def log_since(self, offset: int) -> str:
        with self._log.open("rb") as log:
            log.seek(offset)
            return log.read().decode(errors="replace")

    @property
    def log_size(self) -> int:
        return self._log.stat().st_size

    @contextmanager
    def scene(self, name: str, *, deduplicate: bool = False, **defaults: Any) -> Iterator[Scene]:
        """What one script has to itself: names, a queue, marks, and the processes that it starts."""
        with tempfile.TemporaryDirectory(prefix="delivery-marks-") as marks:
            scene = Scene(self, f"{name}-{uuid4().hex[:6]}", Marks(marks), self._providers[deduplicate], defaults)
            try:
                yield scene
            finally:
                scene.end()


class Scene:
    def __init__(
        self, stage: Stage, name: str, marks: Marks, provider: tuple[Path, str], defaults: dict[str, Any]
    ) -> None:
        self.stage = stage
        self.name = name
        self.marks = marks
        self._ledger, self._provider = provider
        self._defaults = defaults
        self._processes: list[Process] = []
        self._keepers: list[Keeper] = []
        self._log_offset = stage.log_size

    # Processes

    def spec(self, role: str, **more: Any) -> dict[str, Any]:
        options = {**self._defaults, **more}
        visibility = options.pop("visibility", VISIBILITY)
        transport: dict[str, Any] = {"confirm_publish": True}
        if self.stage.broker.name == "redis":
            transport = {
                "visibility_timeout": visibility,
                # How often a worker looks for such messages, and that it does so each time.
                "unacked_restore_interval": 0.2,
                "unacked_restore_throttle": 1,
                "unacked_restore_limit": 1000,
                # A worker that dies while it looks holds all others off for so long; kombu's default is 300.
                "unacked_mutex_expire": 2,
            }
        return {
            "role": role,
            "name": self.name,
            "queue": self.name,
            "broker": self.stage.broker.url,
            "transport": transport,
            "provider": self._provider,
            "marks": str(self.marks.directory),
            "sender": names.ONCE,
            **options,
        }

    def start(self, role: str, **more: Any) -> Process:
        process = self.stage.zygote.fork(**self.spec(role, **more))
        self._processes.append(process)
        return process

    def run(self, role: str, **more: Any) -> None:
        """Start a process and wait until it has done its work."""
        self.start(role, **more).hear()

    def start_workers(self, count: int = 2, **more: Any) -> Keeper:
        keeper = Keeper(self.stage.zygote, [self.spec("worker", **more)] * count)
        self._keepers.append(keeper)
        return keeper

    def start_relay(self, **more: Any) -> Process:
        process = self.start("relay", **more)
        process.hear()
        process.tell()
        return process

    def finish(self, relay: Process) -> int:
        """Let a relay end when nothing is due, and say how much it has sent."""
        relay.tell()
        sent: int = relay.hear()["sent"]
        return sent

    def relay_all(self, **more: Any) -> int:
        """Relay until nothing is left to be sent, whoever has had it before."""
        relay, sent = self.start_relay(**more), 0
        self.until(lambda: not self.unsent(), "the outbox is empty", meanwhile=self.end_backoffs)
        return sent + self.finish(relay)

    def end(self) -> None:
        for keeper in self._keepers:
            keeper.end()
        self._keepers.clear()
        for process in self._processes:
            process.end()
        self._processes.clear()
        # Only a script that failed has left anything, and that must not fail those after it.
        self.stage.query("DELETE FROM idempotency_outbox WHERE status <> 'sent'")
        forget(self.stage.broker)

    # The database's clock, moved by back-dating

    def end_leases(self) -> None:
        """End the leases of all relays that have messages."""
        self.stage.query(
            "UPDATE idempotency_outbox SET lease_expires_at = %s WHERE status = 'pending' AND lease_expires_at > now()",
            LONG_AGO,
        )

    def end_backoffs(self) -> None:
        self.stage.query(
            "UPDATE idempotency_outbox SET next_try_at = %s WHERE status = 'pending' AND next_try_at > now()", LONG_AGO
        )

    # Looking

    def until(
        self,
        condition: Callable[[], Any],
        what: str,
        *,
        meanwhile: Callable[[], object] = lambda: None,
        limit: float = 60.0,
        pause: float = 0.02,
    ) -> Any:
        """Wait until it holds, for as long as messages still take effect and ``limit`` seconds longer."""
        last, progress = time.monotonic(), None
        while not (found := condition()):
            meanwhile()
            if (seen := (self.deliveries(), self.unsent(), self.marks.count("*"))) != progress:
                last, progress = time.monotonic(), seen
            if time.monotonic() > last + limit:
                raise ImpossibleError(f"{what}: nothing has happened for {limit:g} s\n{self.log()[-6000:]}")
            # Between two looks at other processes; what is waited for is looked at, not timed.
            time.sleep(pause)
        return found

    def log(self) -> str:
        return self.stage.log_since(self._log_offset)

    def unsent(self) -> int:
        return int(self.stage.query("SELECT count(*) FROM idempotency_outbox WHERE status = 'pending'")[0][0])

    def deliveries(self) -> int:
        """How often a message has reached a task."""
        path = self.marks.directory / "deliveries"
        return path.read_bytes().count(b"\n") if path.exists() else 0

    def deliveries_of(self, kind: str) -> Counter[str]:
        path = self.marks.directory / "deliveries"
        lines = path.read_text().split() if path.exists() else []
        return Counter(label for label in lines if label.startswith(f"{self.name}-{kind}-"))

    def rows(self, kind: str) -> Counter[str]:
        """How many rows there are of each message that has any."""
        found = self.stage.query(
            "SELECT label, count(*) FROM testproject_transfer WHERE label LIKE %s GROUP BY label",
            f"{self.name}-{kind}-%",
        )
        return Counter(dict(found))

    def payouts(self, kind: str) -> Counter[str]:
        """How often the provider has paid for each message that it has paid for."""
        prefix = f"{self.name}-{kind}-"
        return Counter(effect.label for effect in read_ledger(self._ledger) if effect.label.startswith(prefix))

    def settle(self, meanwhile: Callable[[], object] = lambda: None) -> None:
        """Wait until nothing is to be sent, nothing is queued, and nothing is with a worker.

        A worker has acknowledged a message when the broker no longer counts it. Looked at twice, because kombu takes a
        message off a Redis list a moment before it notes that it has it.
        """
        calm: list[int] = []

        def idle() -> bool:
            if self.unsent() or messages_of(self.stage.broker, self.name):
                calm.clear()
                return False
            calm.append(self.deliveries())
            return len(calm) > 1 and calm[-1] == calm[-2]

        # Less often: to ask a broker takes a connection.
        self.until(idle, "all messages are consumed", meanwhile=meanwhile, pause=0.1)

    def send_again_what_was_lost(self) -> int:
        """Have those protected messages sent again that the broker had confirmed and that never reached their inbox,
        until every one has, and say how many there were.
        """
        sent_again = 0
        while missing := self._without_record():
            # It waits for longer the longer a message has been waiting.
            self.stage.query(
                "UPDATE idempotency_outbox SET created_at = created_at - interval '1 hour', "
                "sent_at = sent_at - interval '1 hour' WHERE payload ->> 'label' LIKE %s",
                f"{self.name}-%",
            )
            found: int = self.start("resender").hear()["found"]
            if found < missing:
                raise ImpossibleError(f"{missing} messages have no record, and {found} were found")
            sent_again += found
            self.settle()
        return sent_again

    def _without_record(self) -> int:
        missing = self.stage.query(
            "SELECT count(*) FROM idempotency_outbox AS message WHERE topic = %s AND payload ->> 'label' LIKE %s "
            "AND NOT EXISTS (SELECT 1 FROM idempotency_record AS record "
            "WHERE record.operation = %s AND record.idempotency_key = message.idempotency_key)",
            names.KEPT,
            f"{self.name}-%",
            names.KEPT,
        )
        return int(missing[0][0])

    def dead_letters(self) -> list[dict[str, Any]]:
        """Take what lies in the dead-letter queue: the headers of each message."""
        from kombu import Connection

        found = []
        with Connection(self.stage.broker.url) as connection:
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


def forget(broker: Broker) -> None:
    """Throw away what nobody consumes: nudges, and what a script that failed has left."""
    if isinstance(broker, RedisServer):
        import redis

        with redis.Redis(port=broker.port) as client:
            client.flushall()
        return
    from kombu import Connection

    # Scripts have queues of their own, so what one leaves there is in nobody's way.
    with Connection(broker.url) as connection, connection.channel() as channel:
        channel.queue_delete(names.NUDGES)


def messages_of(broker: Broker, queue: str) -> int:
    """How many messages the broker has in the queue, those included that a worker has and hasn't acknowledged."""
    if isinstance(broker, RedisServer):
        import redis

        with redis.Redis(port=broker.port) as client:
            return int(client.llen(queue)) + int(client.hlen("unacked"))
    from kombu import Connection

    with Connection(broker.url) as connection, connection.channel() as channel:
        try:
            ready = channel.queue_declare(queue, passive=True).message_count
        except channel.connection.channel_errors:
            return 1  # no worker has declared it yet
    return ready or unacknowledged(broker, queue)


def unacknowledged(broker: Broker, queue: str) -> int:
    """What only the node itself can tell, in a second."""
    done = subprocess.run(
        [str(Path(RabbitNode.program()).with_name("rabbitmqctl")), "-q", "list_queues", "name", "messages"],
        env={**os.environ, **broker._environment()},
        capture_output=True,
        check=True,
        text=True,
    )
    counts = dict(line.split("\t") for line in done.stdout.splitlines()[1:] if "\t" in line)
    return int(counts.get(queue, 0))


@contextmanager
def stage(broker_name: str, url: str | None = None) -> Iterator[Stage]:
    """Bring everything up. ``url`` is that of a PostgreSQL to make a database in; without it, one is run."""
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="delivery-")))
        if url is None:
            from testproject.embedded import embedded_postgres

            url = stack.enter_context(embedded_postgres())
        own = stack.enter_context(own_database(url))
        migrate(own)
        broker_directory = directory / broker_name
        broker_directory.mkdir()
        broker: Broker
        if broker_name == "redis":
            broker = RedisServer(broker_directory)
            broker.fsync = "always"
        else:
            broker = RabbitNode(broker_directory)
        stack.enter_context(broker)
        providers = {}
        for deduplicate in (False, True):
            ledger = directory / f"ledger-{'once' if deduplicate else 'always'}.jsonl"
            providers[deduplicate] = (ledger, stack.enter_context(running_provider(ledger, deduplicate=deduplicate)))
        log = directory / "processes.log"
        zygote = zygote_of_processes(own, log)
        stack.callback(zygote.close)
        made = Stage(broker, own, zygote, providers, log)
        stack.callback(made.close)
        yield made
