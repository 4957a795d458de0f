"""Operating the records: scheduled purge and sweep, statistics, erasure, and decisions that people make.

Plain functions belong here. A command (``management``), a task (``tasks.py``) or an admin page calls them. Work that is
done in batches is built on ``batches.py``.
"""
