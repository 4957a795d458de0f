"""Integrations with other packages. Each has its own extra in ``pyproject.toml``; the core needs none of them.

To add a web framework, write a subclass of ``http.adapter.Adapter`` here and register it. The package's ``apps.py``
imports the modules of frameworks that are in ``INSTALLED_APPS``; nothing else below this folder does.
"""
