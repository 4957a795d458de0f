"""Integrations with other packages. Each has an extra of its own in ``pyproject.toml``; the core needs none of them.

To add a web framework, write a subclass of ``http.adapters.Adapter`` here, register it, and import it in ``apps.py``,
as ``rest_framework`` does. Nothing below this folder imports it.
"""
