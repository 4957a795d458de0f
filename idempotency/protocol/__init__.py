"""The protocol: claim a key, run the operation, record its outcome, and recover what was cut off.

Knows nothing of HTTP or of any framework, and reaches the database through ``sql.store`` alone. ``claims`` decides who
owns a record, ``execution`` runs a handler under a claim, and ``recovery`` settles a claim that was cut off; start
reading there. What is read, purged or decided later is in ``upkeep``.
"""
