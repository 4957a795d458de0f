"""Real processes, killed, frozen and cut off at every named place, and the count of what they did.

``points`` says which cells there are and which make no sense; ``worker`` is what happens inside a process that a cell
breaks; ``observer`` is a cell's view of the database; ``cells`` runs one cell and judges what it left, and ``matrix``
runs all of them. ``calls`` kills at system calls. ``storms`` are about many clients at once, ``failover`` about such
clients when a standby takes over, and ``mutations`` are the broken variants that the harness has to see.
``python -m tools.crashes`` runs all of it in full. It runs on ``tests/harness``.
"""
