"""The HTTP layer: from a request and its ``Idempotency-Key`` to a response.

A request goes through ``decorators`` (is it protected?), ``exchange`` (from its key to its response) and ``handler``
(the run of the view, and the transactions around it). The other modules cover key sources, the payload, the account,
errors as responses, and the checks and the audit of URLs. This package uses plain Django. To support another framework,
write an adapter (``adapter.py``) in ``contrib``.
"""
