"""The edge to HTTP: from a request and its ``Idempotency-Key`` to a response.

A request goes through ``decorators`` (is it protected?), ``exchange`` (from its key to its response), ``attempt`` (the
run of the view) and ``handler`` (the transactions around the view). The other modules have the places of a key, the
payload, the account, errors as responses, and the checks and the audit of URLs. This folder uses plain Django. To add
another framework, write an adapter (``adapter.py``) in ``contrib``.
"""
