"""A conformance suite for any server that takes an ``Idempotency-Key``: ``python -m idempotency.conformance --help``.

It is a client. It sends requests over HTTP/1.1, counts effects from outside of the server, and judges each case by a
rule of the profile: the draft of the IETF, Stripe's API, or the Agentic Commerce Protocol. It imports nothing but the
standard library, and nothing of the rest of this package, so that it judges this package like any other server.
"""
