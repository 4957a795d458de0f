"""Delivery under faults: real brokers and worker processes, with the effects of each message counted where they happen.

``roles`` are the jobs of the forked processes; ``tasks`` are the protected task and its control. A ``stage`` is the
broker, database and providers that they share. ``faults`` are the scripts, one for each delivery failure, and ``tally``
judges the effects of each.
``python -m tools.deliveries`` runs them in full.
"""
