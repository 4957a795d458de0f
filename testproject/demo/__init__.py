"""What runs behind ``manage.py demo``: a storm of retried, duplicated and cut-off requests against a real server.

It has three acts (``acts``): charges in the database, payouts at a payment provider, and orders whose messages go
through a broker. ``plan`` says what will happen in each. ``client`` is one badly behaved client, and ``storm`` is all
of them at once. ``server`` is gunicorn's side of the trouble, and ``life`` is how one of its workers ends. ``consumer``
is relay and worker, and ``hop`` runs them. ``books`` counts effects where they happen, ``verdict`` judges, and
``report`` shows it. ``show`` plays the acts, and ``__main__`` brings up what they need.

Processes strike themselves and leave marks. How that works, and what keeps them from outliving the demo, is in
``testproject.harness``.
"""
