"""First executions and replays over a network: through a proxy that delays each message of the client."""

from __future__ import annotations

import random
import select
import socket
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from django.db import connection
from typing_extensions import Self

from testproject.harness.processes import short_directory

from . import views
from .instruments import Cost, measure_block, relative, round_trips
from .report import Table, count, milliseconds, times
from .requests import BASELINE, BLOCK, PACKAGE, Caller, Variant, account, effects, tables

#: In seconds: nothing added, one rack, one region, two.
DELAYS = (0.0, 0.0002, 0.0005, 0.001)
FIRST_EXECUTIONS = (
    Variant("bare view, own `atomic()`", views.BareAtomicView),
    BASELINE,
    PACKAGE,
    Variant("this package, view has its own `atomic()`", views.PackageAtomicView),
)
REPLAYS = (BASELINE, PACKAGE)

CHUNK = 65_536


class DelayingProxy:
    """A Unix socket in front of a server. What the client sends reaches the server ``delay`` seconds later.

    One delay for each message and its answer together: the round trip is what counts.
    """

    def __init__(self, host: str, port: str) -> None:
        self._server = (host or "localhost", int(port or 5432))
        self._stack = ExitStack()
        self._threads: list[threading.Thread] = []
        self.delay = 0.0

    def __enter__(self) -> Self:
        self.directory = self._stack.enter_context(short_directory("delay-"))
        self._listener = self._stack.enter_context(socket.socket(socket.AF_UNIX))
        self._listener.bind(str(self.directory / ".s.PGSQL.5432"))
        self._listener.listen()
        #: Readable when the block has ended, which every thread looks for.
        self._closed, self._closing = socket.socketpair()
        self._start(self._accept)
        return self

    def __exit__(self, *error: object) -> None:
        self._closing.close()
        for thread in self._threads:
            thread.join()
        self._closed.close()
        self._stack.close()

    def _start(self, target: Callable[..., None], *arguments: object) -> None:
        thread = threading.Thread(target=target, args=arguments)
        thread.start()
        self._threads.append(thread)

    def _accept(self) -> None:
        while self._closed not in select.select([self._listener, self._closed], [], [])[0]:
            self._start(self._serve, self._listener.accept()[0])

    def _serve(self, client: socket.socket) -> None:
        with client, suppress(OSError), self._connect() as server:
            while True:
                ready = select.select([client, server, self._closed], [], [])[0]
                if self._closed in ready:
                    return
                if client in ready:
                    if not (said := client.recv(CHUNK)):
                        return
                    time.sleep(self.delay)
                    server.sendall(said)
                if server in ready:
                    if not (answer := server.recv(CHUNK)):
                        return
                    client.sendall(answer)

    def _connect(self) -> socket.socket:
        host, port = self._server
        if host.startswith("/"):
            server = socket.socket(socket.AF_UNIX)
            server.connect(str(Path(host, f".s.PGSQL.{port}")))
            return server
        server = socket.create_connection(self._server)
        server.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return server


@contextmanager
def delaying_proxy() -> Iterator[DelayingProxy]:
    """Django's connection goes through the proxy during the block."""
    settings = connection.settings_dict
    host, port = settings["HOST"], settings["PORT"]
    with DelayingProxy(host, port) as proxy:
        connection.close()
        settings["HOST"], settings["PORT"] = str(proxy.directory), ""
        try:
            yield proxy
        finally:
            connection.close()
            settings["HOST"], settings["PORT"] = host, port


def compare(operations: int, seed: int, progress: Callable[[str], None]) -> list[Table]:
    """Measure every variant ``operations`` times at each delay, in blocks in random order."""
    lots = random.Random(seed)
    first = {(variant, delay): Cost() for variant in FIRST_EXECUTIONS for delay in DELAYS}
    replayed = {(variant, delay): Cost() for variant in REPLAYS for delay in DELAYS}
    trips = {delay: list[float]() for delay in DELAYS}
    rounds = max(1, operations // BLOCK)
    with tables(), delaying_proxy() as proxy:
        caller = Caller(account())
        keys = {variant: [caller.new_key() for _ in range(BLOCK + 1)] for variant in REPLAYS}
        for variant in FIRST_EXECUTIONS * 2:  # imports, caches, and prepared statements
            for key in keys.get(variant, [caller.new_key()]):
                caller.calling(variant, key)()
        for number in range(rounds):
            progress(f"latency, round {number + 1} of {rounds}")
            for delay in lots.sample(DELAYS, len(DELAYS)):
                proxy.delay = delay
                trips[delay].append(_one_round_trip())
                for variant in lots.sample(FIRST_EXECUTIONS, len(FIRST_EXECUTIONS)):
                    with effects(BLOCK + 1):
                        measure_block(first[variant, delay], [caller.calling(variant) for _ in range(BLOCK + 1)])
                for variant in lots.sample(REPLAYS, len(REPLAYS)):
                    with effects(0):
                        measure_block(replayed[variant, delay], [caller.calling(variant, key) for key in keys[variant]])
        proxy.delay = 0.0
        for variant in FIRST_EXECUTIONS:
            first[variant, 0.0].round_trips = round_trips(caller.calling(variant))
        for variant in REPLAYS:
            replayed[variant, 0.0].round_trips = round_trips(caller.calling(variant, keys[variant][0]))
    return [
        _table("First execution over a network", first, trips),
        _table("Replay over a network", replayed, trips),
    ]


def _one_round_trip() -> float:
    with connection.cursor() as cursor:
        cursor.execute("SELECT 1")
        start = time.perf_counter()
        cursor.execute("SELECT 1")
        return time.perf_counter() - start


def _table(title: str, costs: dict[tuple[Variant, float], Cost], trips: dict[float, list[float]]) -> Table:
    headings = [heading for delay in DELAYS for heading in (f"+{delay * 1e3:g} ms", "")]
    table = Table(
        title,
        ("", "round trips", *headings),
        note="Medians. × is relative to the row `hand-written`. The last row is one round trip through the proxy.",
    )
    for variant in dict.fromkeys(variant for variant, _ in costs):
        cells = []
        for delay in DELAYS:
            cost, base = costs[variant, delay], costs[BASELINE, delay]
            cells += [milliseconds(cost.median), times(relative(cost.block_seconds, base.block_seconds))]
        table.add(variant.name, count(costs[variant, 0.0].round_trips), *cells)
    one = [cell for delay in DELAYS for cell in (milliseconds(statistics.median(trips[delay])), "")]
    table.add("`SELECT 1`", "1", *one)
    return table
