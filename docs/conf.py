"""Sphinx, without a network and without a database: ``sphinx-build -W --keep-going -b html docs docs/_build/html``."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import django
from django.conf import settings

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

# As little of a project as lets the package be imported. There is no database to connect to.
settings.configure(
    INSTALLED_APPS=[
        "django.contrib.auth",
        "django.contrib.contenttypes",
        "rest_framework",
        "idempotency",
        "idempotency.outbox",
        "idempotency.contrib.dashboard",
        "idempotency.contrib.celery",
    ],
    USE_TZ=True,
)
django.setup()

from idempotency import __version__  # noqa: E402 - the package may want the settings above
from tools.evidence import __main__ as evidence  # noqa: E402 - needs the path above

project = "django-idempotency"
author = "django-idempotency contributors"
project_copyright = author
release = version = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc"]
exclude_patterns = ["_build"]

html_theme = "furo"
html_title = f"django-idempotency {release}"
html_copy_source = False
html_static_path = ["_static"]
html_css_files = ["columns.css"]

myst_heading_anchors = 3
myst_enable_extensions = ["deflist"]

autodoc_default_options = {"show-inheritance": True}
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
# A value is shown as it is written in the source, not as it prints.
autodoc_preserve_defaults = True


def compared(page: str, source: str) -> str:
    """Mark the recorded runs that judged older code. The page's file can't, because it doesn't change with the code."""
    return evidence.page(source, with_files=True) if page in evidence.PAGES else source


def read_source(app: Any, page: str, source: list[str]) -> None:
    source[0] = compared(page, source[0])


def write_for_agents(app: Any, error: Exception | None) -> None:
    """Write ``llms.txt``, an index of the pages, and ``llms-full.txt``, all pages in one file."""
    from sphinx.builders.text import TextBuilder
    from sphinx.writers.text import TextTranslator

    if error is not None or app.builder.format != "html":
        return
    index = [f"# {project}\n", "> A view, a task or a message takes effect once for each Idempotency-Key.\n"]
    index.append("- [All pages in one file](llms-full.txt)")
    pages = []
    builder = TextBuilder(app, app.env)
    builder.init()
    for page in app.env.toctree_includes["index"]:
        index.append(f"- [{app.env.titles[page].astext()}]({page}.html)")
        source = compared(page, app.env.doc2path(page).read_text())
        if re.search(r"^```{(eval-rst|include)}", source, re.MULTILINE):  # a page whose text is elsewhere
            text = TextTranslator(app.env.get_and_resolve_doctree(page, builder), builder)
            text.document.walkabout(text)
            source = text.body
        pages.append(source)
    (app.outdir / "llms.txt").write_text("\n".join(index) + "\n")
    (app.outdir / "llms-full.txt").write_text("\n\n".join(pages))


def index_names(app: Any, doctree: Any) -> None:
    """Let the search lead to the place that defines a setting, an option, a check or a code."""
    from docutils import nodes
    from sphinx.addnodes import index

    place = {"reference/settings": nodes.term, "reference/checks": nodes.entry, "reference/wire": nodes.entry}
    if app.env.docname not in place:
        return
    for node in list(doctree.findall(place[app.env.docname])):
        literals = list(node.findall(nodes.literal))
        if not literals or ", ".join(literal.astext() for literal in literals) != node.astext():
            continue  # a text, and no definition
        names = [literal.astext() for literal in literals]
        node["ids"].append(nodes.make_id(f"name-{names[0]}"))
        node.insert(0, index(entries=[("single", name, node["ids"][0], "main", None) for name in names]))


def setup(app: Any) -> None:
    app.connect("env-get-outdated", lambda *_: evidence.PAGES)
    app.connect("source-read", read_source)
    app.connect("doctree-read", index_names)
    app.connect("build-finished", write_for_agents)
