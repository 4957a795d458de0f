"""A private RabbitMQ, alongside any that the machine runs, with its own name, ports, directory and port mapper."""

import os
import signal
import subprocess
from contextlib import contextmanager

from kombu import Connection

from testproject.harness.processes import Daemon, answers, free_port, short_directory
from tests.harness.servers import find_program


class Rabbit(Daemon):
    """One node. ``url`` is what Celery connects to."""

    def __init__(self, directory, mapper):
        """:param mapper: the port of Erlang's port mapper."""
        port = free_port()
        self.url = f"amqp://guest:guest@127.0.0.1:{port}//"
        (directory / "enabled_plugins").write_text("[].\n")
        (directory / "rabbitmq.conf").write_text(
            f"listeners.tcp.1 = 127.0.0.1:{port}\nloopback_users.guest = true\nlog.console = true\n"
        )
        environment = {
            "HOME": str(directory),  # its cookie
            "ERL_CRASH_DUMP": str(directory / "erl_crash.dump"),
            "RABBITMQ_NODENAME": f"tests{port}@localhost",
            "RABBITMQ_DIST_PORT": str(free_port()),
            "RABBITMQ_CONFIG_FILE": str(directory / "rabbitmq.conf"),
            "RABBITMQ_CONF_ENV_FILE": str(directory / "none.conf"),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(directory / "enabled_plugins"),
            "RABBITMQ_MNESIA_BASE": str(directory / "data"),
            "RABBITMQ_LOG_BASE": str(directory / "log"),
            "RABBITMQ_PID_FILE": str(directory / "pid"),
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "-kernel inet_dist_use_interface {127,0,0,1} +S 2:2 +sbwt none",
            "ERL_EPMD_PORT": str(mapper),
            "ERL_EPMD_ADDRESS": "127.0.0.1",
        }
        super().__init__(
            "rabbitmq",
            [find_program("rabbitmq-server", "rabbitmq")],
            directory,
            environment=environment,
            # The first frame of an answer is a method.
            is_ready=lambda: answers(("127.0.0.1", port), b"AMQP\x00\x00\x09\x01", b"\x01"),
        )

    def stop(self):
        """Signal the whole group, because the program is a script that does not forward signals."""
        self._end(signal.SIGTERM, of_all=True)

    def count(self, queue):
        """The number of messages in the queue, including those that a worker has not acknowledged."""
        with Connection(self.url) as connection, connection.channel() as channel:
            try:
                ready = channel.queue_declare(queue, passive=True).message_count
            except channel.connection.channel_errors:
                return 1  # no worker has declared it yet
        return ready or self._unacknowledged(queue)

    def _unacknowledged(self, queue):
        """Only the node can report this, which takes a second."""
        done = subprocess.run(
            [find_program("rabbitmqctl", "rabbitmq"), "-q", "list_queues", "name", "messages"],
            env={**os.environ, **self.environment},
            capture_output=True,
            check=True,
            text=True,
        )
        counts = dict(line.split("\t") for line in done.stdout.splitlines()[1:] if "\t" in line)
        return int(counts.get(queue, 0))


@contextmanager
def running_rabbitmq():
    """Start a node and yield it. It is stopped, and its directory deleted, with the block."""
    mapping = find_program("epmd", "rabbitmq")
    with short_directory("rabbitmq-") as directory:
        mapper = free_port()
        # A node without a port mapper starts one, which outlives it and has an unknown process id.
        command = [mapping, "-port", str(mapper), "-address", "127.0.0.1"]
        with (
            Daemon("epmd", command, directory, is_ready=lambda: answers(("127.0.0.1", mapper))),
            Rabbit(directory, mapper) as node,
        ):
            yield node
