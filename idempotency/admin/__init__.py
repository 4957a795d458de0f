"""The admin's pages for records and messages, and the decisions that people make about them. Django finds them here.

A page contains no logic of its own: it calls a function of ``upkeep`` or ``outbox``, which a command can call too.
"""

from __future__ import annotations

from . import messages, records

__all__ = ["messages", "records"]
