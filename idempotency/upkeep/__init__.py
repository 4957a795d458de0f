"""What runs on a schedule, is read, or is decided by people: purge, sweep, counts, and the resolution of records.

Plain functions belong here. A command (``management``), a task (``tasks.py``) or an admin page calls them. Work in
batches is built on ``batches.py``.
"""
