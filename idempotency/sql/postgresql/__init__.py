"""The store for PostgreSQL with psycopg 3. One file per subject; ``store.py`` combines them."""

from .store import PostgreSQLStore

__all__ = ["PostgreSQLStore"]
