"""The protocol: claim a key, run the operation, record its outcome, and recover what was cut off.

Code that depends on HTTP, a framework or the kind of database belongs in ``http``, ``contrib`` or ``store``. Start
reading with three modules: ``acquisition`` decides who owns a record, ``execution`` runs a handler under a claim, and
``recovery`` settles a claim that was cut off. Statistics, purges and operators' decisions are in ``operate``.
"""
