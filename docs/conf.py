"""Sphinx, without a network and without a database: ``sphinx-build -W --keep-going -b html docs docs/_build/html``."""

from __future__ import annotations

import sys
from pathlib import Path

import django
from django.conf import settings

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

# As little of a project as lets the package be imported. There is no database to connect to.
settings.configure(
    INSTALLED_APPS=["django.contrib.auth", "django.contrib.contenttypes", "rest_framework", "idempotency"],
    USE_TZ=True,
)
django.setup()

from idempotency import __version__  # noqa: E402 - the package may want the settings above

project = "django-idempotency"
author = "django-idempotency contributors"
project_copyright = author
release = version = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc"]
exclude_patterns = ["_build"]

html_theme = "furo"
html_title = f"django-idempotency {release}"
html_copy_source = False

myst_heading_anchors = 3
myst_enable_extensions = ["deflist"]

autodoc_default_options = {"members": True, "show-inheritance": True}
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
# A value is shown as it is written in the source, not as it prints.
autodoc_preserve_defaults = True
