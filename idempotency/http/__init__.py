"""Answering: from a request and its ``Idempotency-Key`` to a response.

A request comes from ``@idempotent`` in ``views`` to ``exchange`` (from its key to its response) and ``handler`` (the
run of the view, and the transactions around it). The other modules cover key sources, the payload, the account, and
errors as responses; ``protection`` and ``stack`` find the operation of a view. This package uses plain Django. To
support another framework, write an adapter (``adapter.py``) in ``contrib``.
"""
