"""The provider's HTTP interface.

``POST /payouts``, with a key in the header ``Idempotency-Key`` and a JSON object as its body, pays:

=============== ================================================================================================
``label``       the name of the payout, for readers of the ledger; optional
``amount``      in cents
``valid_until`` in seconds since 1970; a call that arrives later is refused; optional
``fault``       the fault that the caller selects, see ``faults``; optional
=============== ================================================================================================

It returns 201 with the effect, 400 for an invalid call, 402 for a refusal, and 410 after ``valid_until``. If it
deduplicates, it returns 409 for a key that has paid another amount.

``GET /payouts/<key>`` returns 200 with every effect of the key, or 404 if there is none *yet*: a call in transit may
still arrive, unless its ``valid_until`` has passed. ``GET /payouts?label=<label>`` returns 200 with every effect of the
label, which may be none.
"""

import json
import select
import threading
import time
from dataclasses import asdict
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote

from .faults import Fault
from .ledger import Effect, Ledger

#: A hanging call waits until its caller gives up, but at most this long.
HANG_LIMIT = 60.0  # seconds


class Provider(ThreadingHTTPServer):
    """The server. One lock makes looking up, deduplicating and paying atomic."""

    daemon_threads = True
    request_queue_size = 1024

    def __init__(self, port: int, ledger: Ledger, *, deduplicate: bool) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.ledger = ledger
        self.deduplicate = deduplicate
        self.lock = threading.Lock()
        self.struck: set[str] = set()

    def fault_of(self, payout: str, selected: Fault | None) -> Fault | None:
        """The fault of this call. ``payout`` is its label, or its key without a label."""
        if selected in {None, Fault.REFUSE}:
            return selected
        with self.lock:
            if payout in self.struck:
                return None
            self.struck.add(payout)
        return selected

    def effects_of(self, key: str) -> list[Effect]:
        with self.lock:
            return list(self.ledger.by_key.get(key, ()))

    def effects_labelled(self, label: str) -> list[Effect]:
        with self.lock:
            return [effect for effects in self.ledger.by_key.values() for effect in effects if effect.label == label]

    def pay(self, key: str, label: str, amount: int, valid_until: float | None) -> tuple[HTTPStatus, Any]:
        """Make the payout, unless the call is too late or, with deduplication, the key has already paid."""
        with self.lock:
            now = time.time()
            known = next(iter(self.ledger.by_key.get(key, ())), None)
            if self.deduplicate and known is not None:
                if (known.label, known.amount) != (label, amount):
                    return HTTPStatus.CONFLICT, {"code": "key_reused"}
                return HTTPStatus.CREATED, asdict(known)
            if valid_until is not None and now >= valid_until:
                return HTTPStatus.GONE, {"code": "expired"}
            return HTTPStatus.CREATED, asdict(self.ledger.append(key, label, amount, now))


class Handler(BaseHTTPRequestHandler):
    server: Provider
    # Headers and body are two writes. With Nagle's algorithm, the second would wait for an acknowledgement.
    disable_nagle_algorithm = True

    def do_GET(self) -> None:
        path, _, query = self.path.partition("?")
        if path == "/payouts":
            status, effects = HTTPStatus.OK, self.server.effects_labelled(parse_qs(query).get("label", [""])[0])
        else:
            collection, _, key = path.rpartition("/")
            effects = self.server.effects_of(unquote(key)) if collection == "/payouts" else []
            status = HTTPStatus.OK if effects else HTTPStatus.NOT_FOUND
        self._answer(status, {"effects": [asdict(effect) for effect in effects]})

    def do_POST(self) -> None:
        try:
            call = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            key, label, amount = self.headers["Idempotency-Key"], str(call.get("label", "")), int(call["amount"])
            if not key:
                raise ValueError("A call needs an Idempotency-Key.")
            valid_until, selected = call.get("valid_until"), Fault(call["fault"]) if call.get("fault") else None
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            self._answer(HTTPStatus.BAD_REQUEST, {"code": "invalid", "detail": repr(error)})
            return
        fault = self.server.fault_of(label or key, selected)
        if fault is Fault.REFUSE:
            self._answer(HTTPStatus.PAYMENT_REQUIRED, {"code": "refused"})
            return
        if fault is Fault.ERROR_BEFORE:
            self._answer(HTTPStatus.INTERNAL_SERVER_ERROR, {"code": "error"})
            return
        if fault in {Fault.HANG, Fault.LATE}:
            self._outlast_the_caller()
        if fault is Fault.HANG:
            return
        status, body = self.server.pay(key, label, amount, valid_until)
        if fault is Fault.SUCCEED_THEN_HANG:
            self._outlast_the_caller()
        elif fault is Fault.ERROR_AFTER_SUCCESS:
            self._answer(HTTPStatus.INTERNAL_SERVER_ERROR, {"code": "error"})
        else:
            self._answer(status, body)  # after LATE, the caller has probably disconnected

    def _outlast_the_caller(self) -> None:
        """Wait until the caller has disconnected or died."""
        waiting = select.poll()
        waiting.register(self.connection, select.POLLIN)
        waiting.poll(HANG_LIMIT * 1000)  # the request has been read, so the next event is the disconnection
        self.close_connection = True

    def _answer(self, status: HTTPStatus, body: Any) -> None:
        content = json.dumps(body).encode()
        try:
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)
        except OSError:
            self.close_connection = True  # the caller has disconnected

    def log_message(self, *args: Any) -> None:
        """Log nothing, because the ledger is the log."""
