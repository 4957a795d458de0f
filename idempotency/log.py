"""A logging filter that says which operation a line belongs to. It is used only if ``LOGGING`` names it."""

from __future__ import annotations

import logging

from .protocol.context import current_claim


class ClaimFilter(logging.Filter):
    """Adds attributes to each log record, which a formatter can show::

        "filters": {"claim": {"()": "idempotency.log.ClaimFilter"}},
        "formatters": {"plain": {"format": "%(message)s %(idempotency_operation)s %(idempotency_trace)s"}},

    The attributes are ``idempotency_operation`` (str), ``idempotency_trace`` (str) and ``idempotency_attempt`` (int) of
    the claim under which the code runs. Outside of a claim they are empty strings. The filter lets every record pass.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        claim = current_claim()
        record.idempotency_operation = claim.operation.name if claim else ""
        record.idempotency_trace = claim.trace if claim else ""
        record.idempotency_attempt = claim.attempt if claim else ""
        return True
