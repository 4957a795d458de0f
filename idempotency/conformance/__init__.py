"""A conformance suite for servers that accept an ``Idempotency-Key``: ``python -m idempotency.conformance --help``.

The suite is a client. It sends requests over HTTP/1.1, counts effects outside the server, and judges each case by a
rule of the profile: the IETF draft, Stripe's API, or the Agentic Commerce Protocol. It imports only the standard
library and nothing else from this package, so it judges this package like any other server.
"""
