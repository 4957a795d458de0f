"""The admin's pages for records, and the decisions that people make about them. Django finds them here.

A page contains no logic: it calls a function of ``operate``, which a command can call too.
"""

from . import records

__all__ = ["records"]
