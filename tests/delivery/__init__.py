"""Delivery, broken on purpose: real brokers and real worker processes, with each message counted where it takes effect.

``roles`` are the jobs of the forked processes; ``tasks`` are the protected task and its control. A ``stage`` is the
broker, database and providers that they share. ``faults`` are the scripts, one for each delivery failure, and ``tally``
judges the effects of each.
``python -m tools.deliveries`` runs them in full.
"""
