"""What runs behind ``manage.py demo``: a storm of retried, duplicated and cut-off charges against a real server.

``plan`` says what will happen, ``payouts`` what of it happens at a payment provider, ``orders`` what goes through a
broker. ``server`` runs gunicorn (``gunicorn_conf``), ``workers`` kills its workers, ``faults`` is the server's side of
the trouble. ``client`` is one badly behaved client, ``storm`` is all of them at once. ``hop`` runs what is behind the
server: ``broker``, and relay and worker (``consumer``), as ``processes``, which ``killer`` kills. ``tally`` counts what
is seen on the way, ``ledger`` counts effects where they happen, ``verdict`` judges, and ``report`` shows it. And
``__main__`` ties them together.
"""
