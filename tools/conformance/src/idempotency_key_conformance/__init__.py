"""Judges servers that accept an ``Idempotency-Key``: ``idempotency-key-conformance --help``.

The suite is a client. It sends requests over HTTP/1.1, counts effects outside the server, and judges each case by a
rule of the profile: the IETF draft, Stripe's API, or the Agentic Commerce Protocol. It imports only the standard
library.
"""

__version__ = "0.1.0"
