"""``python -m tools.phrases``: report phrases that a native technical writer would not use.

A report for whoever edits the text. It exits with 1 if there are any, which fails neither tests nor CI.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

from tools.reports import say

ROOT = Path(__file__).resolve().parent.parent

#: Phrases that a native technical writer would not use, as regular expressions, and their replacements.
REFUSED: dict[str, str] = {
    r"\b(is|are|was|were|be|been|being|isn't|aren't) (never )?(told|asked|seen)\b": "returned, queried, detected",
    r"\b(says?|said|tells?|told) (what|which|why|how|whether|so)\b": "reports, explains, decides, states",
    r"(?<!there\s)\b(is|are) no (?!longer\b|more\b|later\b)\w+": "is not, or the positive word",
    r"\bof (its|their|your|his|her|our) own\b": "its, your, separate",
    r"\b(that|those) of\b": "repeat the noun",
    r"\bsuch as by\b": "for example",
    r"\banew\b": "again",
    r"\bwhat (it|they|he|this|that) (is|was|are|were)\b": "the noun",
    r"\bin (the )?place of\b": "instead of",
    r"\bfor lack of\b": "because there is no",
    r"\b(nobody|somebody|no one|whatever)\b": "the client, the operator, the process",
    r"\bgo(es|ing)? on \w+ing\b": "continue, keep",
}


#: The files, as patterns below the root.
FILES = (
    *("*.md", "docs/**/*.md", "testproject/*.md", "tests/*.md"),
    *(f"{folder}/**/*.py" for folder in ("idempotency", "testproject", "tests", "tools")),
)
#: Files that quote the phrases.
QUOTING = {Path(__file__), ROOT / "tests/docs/test_habits.py"}


def refused_phrases(text: str) -> Iterator[tuple[int, str]]:
    """Refused phrases and their lines. A phrase may be broken across two lines. Code is ignored."""
    text = re.sub(r"`[^`\n]+`", lambda code: "x" * len(code[0]), text)
    for pattern, instead in REFUSED.items():
        for found in re.finditer(pattern.replace(" ", r"\s+"), text, re.IGNORECASE):
            line = text.count("\n", 0, found.start()) + 1
            yield line, f"{' '.join(found[0].split())!r}: {instead}"


def words_of(path: Path) -> str:
    """The text of a file. In Python, a comment or message broken across lines is one text, a test's name is words."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".py":
        return text
    text = re.sub(r"(?m)^ *#:?|\" *\n *f?\"", lambda mark: re.sub(r"\S", " ", mark[0]), text)
    text = re.sub(r"(?<=def )test_\w+", lambda name: name[0].replace("_", " "), text)
    return text.replace('"nobody"', "")  # a user of the system


def main() -> int:
    paths = sorted({path for pattern in FILES for path in ROOT.glob(pattern)} - QUOTING)
    refused = [(path.relative_to(ROOT), *found) for path in paths for found in refused_phrases(words_of(path))]
    for path, line, phrase in refused:
        say(f"{path}:{line}: {phrase}")
    return int(bool(refused))


if __name__ == "__main__":
    sys.exit(main())
