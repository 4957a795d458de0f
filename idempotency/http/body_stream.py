"""Detects that a client's connection ended before the whole body arrived.

A WSGI server passes on the bytes that have arrived, and Django takes them for the whole body. Only the server's stream
shows the difference, because middleware may read the body before the view, or replace it, for example decompress it. So
the stream is watched from the beginning, unless no operation can find a key in the request.

A chunked body has no length, so Django takes it for empty. If a handler reads it, the server raises an error where it
breaks off. Under ASGI nothing is watched, because Django reads the whole body before it calls any middleware, and drops
a request whose body breaks off.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, Final

from django.core.signals import request_started
from django.dispatch import receiver
from django.http import HttpRequest
from django.urls import get_resolver

from ..exceptions import PayloadInvalidError
from ..identity import keys
from ..operation import registry
from .key_sources import FromHeader, has_key_header

#: The key of the ``BodyStream`` in the environment of a WSGI request.
BODY_STREAM: Final = "idempotency.body_stream"
#: The substitute if a request has no ``BodyStream``.
UNWATCHED: Final[AbstractContextManager[None]] = nullcontext()


class BodyStream:
    """Wraps the server's body stream. Other methods than PEP 3333's are the stream's own.

    Within its ``with`` block, which a protected request enters, a read that ends too early raises an error.

    :param length: the Content-Length; 0 if the body is chunked.
    """

    def __init__(self, stream: Any, length: int) -> None:
        self._stream = stream
        self._missing = length
        self._requests = 0  # a counter, because an operation may call another one
        #: Whether the connection ended before the whole body arrived.
        self.is_cut: bool = False

    def __enter__(self) -> None:
        if self.is_cut:
            raise _half_a_body()
        self._requests += 1

    def __exit__(self, *error: object) -> None:
        self._requests -= 1

    def read(self, size: int | None = -1, /) -> bytes:
        return self._take(self._stream.read, size, ends_at=())

    def readline(self, size: int | None = -1, /) -> bytes:
        return self._take(self._stream.readline, size, ends_at=b"\n")

    def readlines(self, hint: int | None = None, /) -> list[bytes]:
        return list(self)

    def __iter__(self) -> Iterator[bytes]:
        return iter(self.readline, b"")

    def readinto(self, buffer: Any, /) -> int:
        """For ``io.BufferedReader``, and counted, so that the bytes are not taken for missing ones later."""
        data = self.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _take(self, read: Callable[[Any], bytes], size: int | None, *, ends_at: bytes | tuple[()]) -> bytes:
        wanted = self._missing if size is None or size < 0 else min(size, self._missing)
        data = b""
        try:
            data = read(size)
            # Only an empty read means the end of the stream, and Django doesn't read again after a short one.
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
            raise _half_a_body()
        self._missing -= len(data)
        return data


@receiver(request_started)
def watch_body(environ: dict[str, Any] | None = None, **signal: object) -> None:
    """Put a ``BodyStream`` into the environment of a WSGI request with a body, before Django creates the request.

    A request in which no operation can find a key keeps the server's stream.
    """
    if environ is None:
        return
    try:
        length = int(environ.get("CONTENT_LENGTH") or 0)
    except ValueError:
        return  # Django takes the body for empty
    if (length > 0 or "HTTP_TRANSFER_ENCODING" in environ) and _may_have_key(environ):
        environ["wsgi.input"] = environ[BODY_STREAM] = BodyStream(environ["wsgi.input"], length)


def _may_have_key(environ: Mapping[str, Any]) -> bool:
    """Whether an operation may find a key in the request: in a header, or in a place that is not read here."""
    if keys.META_NAME in environ:
        return True
    with suppress(Exception):  # a broken URLconf, for which Django answers the request, or a broken setting
        get_resolver().url_patterns  # noqa: B018 - imports the views, so that their operations are known
        return has_key_header(environ) or not all(isinstance(source, FromHeader) for source in registry.key_sources())
    return True


def refuse_half_a_body(http: HttpRequest) -> None:
    """:raises PayloadInvalidError: the connection ended before the whole body arrived."""
    stream: BodyStream | None = http.META.get(BODY_STREAM)
    if stream is not None and stream.is_cut:
        raise _half_a_body()


def _half_a_body() -> PayloadInvalidError:
    return PayloadInvalidError(
        "The connection ended before the whole body had arrived. Send the request again with the same Idempotency-Key.",
        retry_after=1,
    )
