"""The moves of docs/how-to/move-from-another-package.md, from the old packages' releases: `tox -e moving`."""
