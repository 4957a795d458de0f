"""A build hook for the metadata that the package index shows: authors, links and README.

No file of the project names its hosting site or a person. The release workflow passes both in environment variables.
``REPOSITORY_URL`` is the repository, for example ``https://github.com/owner/name``. Without it, the metadata contains
no links, and the README's links stay relative. ``CONTACT_EMAIL`` is the maintainers' address. Without it, the metadata
contains no address. A wheel built from an sdist inherits the sdist's metadata.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

#: The beginning of a link to a file in the repository.
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
