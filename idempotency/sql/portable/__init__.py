"""SQLite, and any database behind Django's ORM."""

from .claims import PortableStore, SQLiteStore

__all__ = ["PortableStore", "SQLiteStore"]
