"""The store for SQLite and any other database, with Django's ORM. One file per subject; ``store.py`` combines them."""

from .store import PortableStore, SQLiteStore

__all__ = ["PortableStore", "SQLiteStore"]
