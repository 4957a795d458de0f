"""The edge to HTTP: from a request and its ``Idempotency-Key`` to a response.

This folder uses plain Django. To add another framework, write an adapter (``adapters.py``) in ``contrib``.
"""
