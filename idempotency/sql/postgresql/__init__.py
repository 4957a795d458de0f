"""PostgreSQL, through psycopg 3. A file per subject holds its statements; ``store.py`` puts them together."""

from .store import PostgreSQLStore

__all__ = ["PostgreSQLStore"]
