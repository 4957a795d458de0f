"""A logging filter that says which operation a line belongs to. Set up in ``LOGGING``; nothing here is on by itself."""

from __future__ import annotations

import logging

from .protocol.context import current_claim


class ClaimFilter(logging.Filter):
    """Gives each record of a handler what its formatter can show::

        "filters": {"claim": {"()": "idempotency.log.ClaimFilter"}},
        "formatters": {"plain": {"format": "%(message)s %(idempotency_operation)s %(idempotency_trace)s"}},

    ``idempotency_operation`` (str), ``idempotency_trace`` (str) and ``idempotency_attempt`` (int), of the claim that
    the logging code runs under. Outside of one they are empty strings. Lets every record pass.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        claim = current_claim()
        record.idempotency_operation = claim.operation.name if claim else ""
        record.idempotency_trace = claim.trace if claim else ""
        record.idempotency_attempt = claim.attempt if claim else ""
        return True
