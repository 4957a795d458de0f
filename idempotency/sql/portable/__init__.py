"""SQLite, and any database behind Django's ORM. A file per subject; ``store.py`` puts them together."""

from .store import PortableStore, SQLiteStore

__all__ = ["PortableStore", "SQLiteStore"]
