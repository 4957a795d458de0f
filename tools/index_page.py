"""What the package index shows of a release: the project's links and the README.

No file of the project names the site that hosts it. The build reads it from ``REPOSITORY_URL``, such as
``https://github.com/owner/name``; the release workflow sets it. Without it, the metadata has no links, and those of the
README stay relative. A wheel that is built from an sdist takes over the sdist's metadata.
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
