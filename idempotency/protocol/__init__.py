"""The protocol: claim a key, run the operation, record its outcome, and recover what was cut off.

This folder uses neither HTTP nor a framework. Statements that depend on the database are in ``sql.store``. Start
reading with three modules: ``claims`` decides who owns a record, ``execution`` runs a handler under a claim, and
``recovery`` settles a claim that was cut off. Statistics, purge and people's decisions are in ``upkeep``.
"""
