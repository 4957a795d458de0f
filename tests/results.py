"""Figures of full runs: with ``RESULTS=FOLDER`` each adds a line to a file there, for the evidence page."""

import json
import os
import subprocess
from datetime import UTC, datetime
from pathlib import Path


def note(what, **figures):
    """Add what a run came to. Without ``RESULTS`` nothing is kept."""
    if folder := os.environ.get("RESULTS"):
        head = ["git", "rev-parse", "--short=12", "HEAD"]
        commit = subprocess.run(head, capture_output=True, text=True, check=False).stdout.strip()
        line = {"what": what, "date": datetime.now(UTC).date().isoformat(), "commit": commit, **figures}
        with Path(folder, "results.jsonl").open("a", encoding="utf-8") as results:
            results.write(json.dumps(line) + "\n")
