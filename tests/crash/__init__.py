"""Real processes, killed, frozen and cut off at every named place, and the count of what they did.

``points`` says which cells there are and which make no sense; ``worker`` is what happens inside a process that a cell
breaks; ``arena`` is what all cells share; ``processes`` starts workers and judges what they left; ``cells`` runs one
cell and ``matrix`` all of them. ``storms`` are about many clients at once, ``failover`` about such
clients when a standby takes over, and ``mutations`` are the broken variants that the harness has to see.
``python -m tools.crashes`` runs all of it in full. It runs on ``tests/harness``.
"""
