"""Template tags: ``{% load idempotency %}``."""
