"""Clients that never stop, on servers that a nemesis kills, freezes and starts again.

``load`` are the clients, ``servers`` what they ask, ``nemesis`` what goes wrong and when. ``settings`` and ``urls`` are
those of the servers. ``python -m tools.soak`` runs all of it, and has the judge of what must hold at a checkpoint.
"""
