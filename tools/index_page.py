"""What the package index shows of a release: its authors, the project's links and the README.

No file of the project names the site that hosts it, or a person. The build reads both from the environment; the release
workflow sets them. ``REPOSITORY_URL`` is such as ``https://github.com/owner/name``: without it, the metadata has no
links, and those of the README stay relative. ``CONTACT_EMAIL`` is where the maintainers read mail: without it, the
metadata has no address. A wheel that is built from an sdist takes over the sdist's metadata.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

#: The beginning of a link to a file of the repository.
RELATIVE_LINK = re.compile(r"\]\((?!https?:|#)")


class IndexPage(MetadataHookInterface):
    def update(self, metadata: dict[str, Any]) -> None:
        author = {"name": "django-idempotency contributors"}
        if email := os.environ.get("CONTACT_EMAIL"):
            author["email"] = email
        metadata["authors"] = [author]
        readme = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        if repository := os.environ.get("REPOSITORY_URL", "").rstrip("/"):
            files = f"{repository}/blob/v{metadata['version']}/"
            readme = RELATIVE_LINK.sub(f"]({files}", readme)
            metadata["urls"] = {
                "Source": repository,
                "Documentation": f"{files}docs/index.md",
                "Changelog": f"{files}CHANGELOG.md",
                "Issues": f"{repository}/issues",
                "Security": f"{files}SECURITY.md",
            }
        metadata["readme"] = {"content-type": "text/markdown", "text": readme}
