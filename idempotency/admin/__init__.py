"""The admin's pages, which Django finds here: records, messages, and the decisions that people take on them.

Pages are thin: what they do is a function of ``upkeep`` or ``outbox``, which a command can call too.
"""

from __future__ import annotations

from . import messages, records

__all__ = ["messages", "records"]
