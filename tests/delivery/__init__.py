"""Delivery, broken on purpose: real brokers and real worker processes, each message counted where it takes effect.

``zygote`` forks the processes and ``roles`` is what they do; ``tasks`` are what is consumed, protected and as the
control; ``strikes`` is where they are broken. A ``stage`` is what all of it runs on. ``faults`` are the scripts, one
for each way in which delivery goes wrong, and ``tally`` judges what each left. ``python -m tests.delivery`` runs them
in full.
"""
