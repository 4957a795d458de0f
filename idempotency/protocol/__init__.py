"""The protocol: claim a key, run the operation, record its outcome, and recover what was cut off.

Knows nothing of HTTP or of any framework. What is read, purged or decided later is in ``upkeep``.
"""
