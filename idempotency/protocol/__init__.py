"""The protocol: claim a key, run the operation, record its outcome, and recover what was cut off.

Code that depends on HTTP, a framework or the kind of database belongs in ``http``, ``contrib`` or ``store``. Start
reading with three modules: ``acquisition`` decides who owns a record, ``execution`` runs a handler under a claim, and
``recovery`` settles a claim that was cut off. ``decisions`` carries out a decision about a record that is there, and
``waiting`` is the door to all of them. Statistics, purges and operators' decisions are in ``operate``.
"""
