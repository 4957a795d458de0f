"""Real processes are killed, frozen and disconnected at every named point. Then their effects are counted.

``points`` lists the cells and the excluded combinations; ``worker`` runs inside the process that a cell breaks;
``observer`` is a cell's view of the database; ``cells`` runs one cell and judges its effects, and ``matrix`` runs all
of them. ``storms`` runs many clients at once, ``failover`` does so while a standby takes over, and ``mutations`` are
the broken variants that the harness must detect. ``python -m tools.crashes`` runs everything in full.
"""
