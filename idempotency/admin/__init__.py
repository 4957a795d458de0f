"""The admin's pages for records and decisions about them. The logic is in ``operate``."""

from . import records

__all__ = ["records"]
