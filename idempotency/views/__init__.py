"""Declaring: from a view and its decorators to the operation that protects it, or to the reason why it is refused.

``decorators`` has ``@idempotent``, ``view_classes`` the mixin and ``EVERY``, ``layers`` judges decorators below a
protection. ``routes``, ``checks`` and ``route_audit`` read the URLs of a project. ``http`` answers the requests.
"""
