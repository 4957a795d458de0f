"""The edge to HTTP: from a request and its ``Idempotency-Key`` to a response.

Plain Django is spoken here. Another framework is an adapter in ``contrib``.
"""
