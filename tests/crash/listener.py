"""What proxies have in common: each connection is served in a thread of its own, for as long as the block."""

from __future__ import annotations

import select
import socket
import threading
from collections.abc import Callable

from typing_extensions import Self

CHUNK = 65_536


class Listener:
    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._threads: list[threading.Thread] = []
        #: Readable when the block has ended, which whoever serves has to look for.
        self._closed, self._closing = socket.socketpair()

    def __enter__(self) -> Self:
        self._start(self._accept)
        return self

    def __exit__(self, *error: object) -> None:
        self._closing.close()
        for thread in self._threads:
            thread.join()
        self._closed.close()
        self._listener.close()

    def _serve(self, client: socket.socket) -> None:
        raise NotImplementedError

    def _accept(self) -> None:
        while self._closed not in select.select([self._listener, self._closed], [], [])[0]:
            client, _ = self._listener.accept()
            self._start(self._serve, client)

    def _start(self, target: Callable[..., None], *arguments: object) -> None:
        thread = threading.Thread(target=target, args=arguments)
        thread.start()
        self._threads.append(thread)
