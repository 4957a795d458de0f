"""PostgreSQL, through psycopg 3."""

from .claims import PostgreSQLStore

__all__ = ["PostgreSQLStore"]
