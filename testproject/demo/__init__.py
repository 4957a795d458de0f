"""What runs behind ``manage.py demo``: two storms of retried, duplicated and cut-off requests against a real server.

The first storm is of charges, the second of messages: orders whose receipts go through outbox, Redis and a Celery
worker. Each meets a protected endpoint and its unprotected twin. ``charges`` says what is sent and which trouble it
meets. ``client`` has badly behaved clients, and the storm of them all. ``server`` is gunicorn's side of the
trouble, ``consumer`` is relay and worker, and ``hop`` runs and kills them. ``verdict`` compares what clients were told
with the effects, which are counted where they happen. ``__main__`` brings everything up, and ``show`` plays the storms.
"""
