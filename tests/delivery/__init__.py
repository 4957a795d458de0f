"""Delivery, broken on purpose: real brokers and real worker processes, each message counted where it takes effect.

``roles`` is what the processes do, which the zygote of ``tests.crash`` forks; ``tasks`` are what is consumed, protected
and as the control. A ``stage`` is what all of it runs on. ``faults`` are the
scripts, one for each way in which delivery goes wrong, and ``tally`` judges what each left.
``python -m tools.deliveries`` runs them in full.
"""
