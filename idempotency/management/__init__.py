"""The commands of ``manage.py``: each parses its arguments, calls a function of ``operate`` or ``outbox``, and reports.

To add a command that works in batches, write a subclass of ``running.BatchCommand`` in ``commands``.
"""
