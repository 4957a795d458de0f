"""The program behind ``manage.py demo``: storms of retried, duplicated and cut-off requests to a real server.

The first storm sends charges. The second sends payments, whose control only leaves ``begin()`` out. The third sends
orders, whose receipts go through the outbox, Redis and a Celery worker. Each storm calls a protected endpoint and its
unprotected twin.

- ``charges`` defines the charges and orders, and the trouble that each runs into.
- ``client`` contains the badly behaved clients, and runs a storm of them.
- ``server`` configures gunicorn and kills its workers.
- ``consumer`` is the relay and the Celery worker. ``hop`` runs and kills them.
- ``verdict`` compares the clients' responses with the effects, which are counted where they happen.
- ``__main__`` starts everything, and ``show`` runs the storms and prints their results.
"""
