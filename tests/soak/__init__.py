"""Clients that never stop, on servers that a nemesis kills, freezes and starts again.

``load`` contains the clients, ``servers`` the servers they call, and ``nemesis`` the faults and their schedule. The
servers use ``settings`` and ``urls``. ``python -m tools.soak`` runs everything and judges each checkpoint.
"""
