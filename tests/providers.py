"""What tests of the stand-in provider share: its faults by kind, calls that are held up, and a bound for waiting."""

import socket
import time
from urllib.parse import urlsplit

#: Seconds after which the API gives up on a provider that hangs, and a bound for one that doesn't.
IMPATIENCE = 1.0
PATIENCE = 30.0

#: What the provider does to a first call that fails, and whether it has paid then.
PAID = ["succeed_then_hang", "error_after_success", "late"]
UNPAID = ["error_before", "hang"]
#: After which the caller hears nothing.
HANGING = {"succeed_then_hang", "late", "hang"}


def eventually(condition):
    """Whether it comes true while another process is at it."""
    deadline = time.monotonic() + PATIENCE
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)  # between two bounded looks at another process, which has no event to wait for
    return condition()


def begin(address, body, key):
    """Send a call and leave it under way."""
    place = urlsplit(address)
    connection = socket.create_connection((str(place.hostname), place.port or 0), timeout=PATIENCE)
    connection.sendall(
        f"POST /payouts HTTP/1.0\r\nIdempotency-Key: {key}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
    )
    return connection


def end(connection):
    """Hang up, and hear what the call came to all the same."""
    connection.shutdown(socket.SHUT_WR)
    with connection, connection.makefile("rb") as answer:
        return answer.read()


def raw(address, body, key):
    return end(begin(address, body, key))
