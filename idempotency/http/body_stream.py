"""Finds out that a client's connection ended before its whole body had arrived.

A server of WSGI hands over what has arrived, and Django takes that for the body. Only the server's own stream shows the
difference: middleware may have read the body before the view, and may have put another one in its place, such as an
unpacked one. So the stream of each request is watched from the beginning.

A chunked body has no length. Django takes it for empty, and if a handler reads it from the server, the server raises an
error where it breaks off. Nothing is watched under ASGI: Django has the whole body before it calls any middleware, and
drops a request whose body breaks off.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

from django.core.signals import request_started
from django.dispatch import receiver

from ..exceptions import PayloadInvalidError

#: The name under which the environment of a WSGI request holds its ``BodyStream``.
BODY_STREAM: Final = "idempotency.body_stream"


class BodyStream:
    """The server's stream of a body, with the methods that PEP 3333 allows.

    Within a ``with`` block, which is a protected request, half a body is an error for the code that reads it.

    :param length: the number of bytes that the client has announced; 0 if the body is chunked.
    """

    def __init__(self, stream: Any, length: int) -> None:
        self._stream = stream
        self._missing = length
        self._requests = 0  # an operation may call another one
        #: Whether the connection has ended before the whole body had arrived.
        self.is_cut: bool = False

    def __enter__(self) -> None:
        self.refuse_half()
        self._requests += 1

    def __exit__(self, *error: object) -> None:
        self._requests -= 1

    def refuse_half(self) -> None:
        if self.is_cut:
            raise half_a_body()

    def read(self, size: int | None = -1, /) -> bytes:
        return self._take(self._stream.read, size, ends_at=())

    def readline(self, size: int | None = -1, /) -> bytes:
        return self._take(self._stream.readline, size, ends_at=b"\n")

    def readlines(self, hint: int | None = None, /) -> list[bytes]:
        return list(self)

    def __iter__(self) -> Iterator[bytes]:
        return iter(self.readline, b"")

    def _take(self, read: Callable[[Any], bytes], size: int | None, *, ends_at: bytes | tuple[()]) -> bytes:
        wanted = self._missing if size is None or size < 0 else min(size, self._missing)
        data = b""
        try:
            data = read(size)
            # Only an empty read is the end of the stream, and Django doesn't read again after a short one.
            while len(data) < wanted and not data.endswith(ends_at):
                more = read(wanted - len(data))
                data += more
                if not more:
                    self.is_cut = True
                    break
        except OSError:  # such as a reset connection
            self.is_cut = True
            if not data and not self._requests:
                raise
        if self.is_cut and self._requests:
            raise half_a_body()
        self._missing -= len(data)
        return data


@receiver(request_started)
def watch_body(environ: dict[str, Any] | None = None, **signal: object) -> None:
    """Put a ``BodyStream`` into the environment of a WSGI request with a body, before Django makes the request."""
    if environ is None:
        return
    try:
        length = int(environ.get("CONTENT_LENGTH") or 0)
    except ValueError:
        return  # Django takes the body for empty
    if length > 0 or "HTTP_TRANSFER_ENCODING" in environ:
        environ["wsgi.input"] = environ[BODY_STREAM] = BodyStream(environ["wsgi.input"], length)


def half_a_body() -> PayloadInvalidError:
    return PayloadInvalidError(
        "The connection ended before the whole body had arrived. Send the request again with the same Idempotency-Key.",
        retry_after=1,
    )
