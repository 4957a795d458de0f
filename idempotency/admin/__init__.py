"""The admin's pages, which Django finds here: records, messages, and the decisions that people take on them."""

from __future__ import annotations

from . import messages, records

__all__ = ["messages", "records"]
