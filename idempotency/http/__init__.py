"""The edge to HTTP: from a request and its ``Idempotency-Key`` to a response.

Plain Django is spoken here. To add another framework, write an adapter (``adapters.py``) in ``contrib``.
"""
