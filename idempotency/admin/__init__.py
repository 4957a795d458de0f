"""The admin's pages for records and decisions about them. They contain no logic: they call functions of ``operate``."""

from . import records

__all__ = ["records"]
