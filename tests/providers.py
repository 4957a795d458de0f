"""Shared parts of tests with the stand-in provider: its faults by kind, suspended calls, and a bounded wait."""

import socket
import time
from urllib.parse import urlsplit

#: Timeouts in seconds: for a provider that hangs, and for one that answers.
IMPATIENCE = 1.0
PATIENCE = 30.0

#: Faults of a payout's first call, by whether the provider has paid.
PAID = ["succeed_then_hang", "error_after_success", "late"]
UNPAID = ["error_before", "hang"]
#: Faults after which the caller gets no answer.
HANGING = {"succeed_then_hang", "late", "hang"}


def eventually(condition):
    """Whether the condition becomes true in time, while another process works."""
    deadline = time.monotonic() + PATIENCE
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)  # polling: another process has no event to wait for
    return condition()


def begin(address, body, key):
    """Send a call without reading its answer."""
    place = urlsplit(address)
    connection = socket.create_connection((str(place.hostname), place.port or 0), timeout=PATIENCE)
    connection.sendall(
        f"POST /payouts HTTP/1.0\r\nIdempotency-Key: {key}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
    )
    return connection


def end(connection):
    """Stop sending, and read the call's answer."""
    connection.shutdown(socket.SHUT_WR)
    with connection, connection.makefile("rb") as answer:
        return answer.read()


def raw(address, body, key):
    return end(begin(address, body, key))
