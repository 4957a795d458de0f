"""The diagrams of the explanation are those that their sources describe."""

from __future__ import annotations

import re
import runpy

import pytest

from idempotency import lifecycle
from tests.docs.pages import DOCS

pytestmark = pytest.mark.once

PICTURES = DOCS / "pictures"


def test_the_states_are_drawn_as_they_are_declared() -> None:
    drawn = re.findall(r"<title>(\w+)&#45;&gt;(\w+)</title>", (PICTURES / "states.svg").read_text())
    declared = re.findall(r"^(\w+) +-> (\w+)", lifecycle.__doc__ or "", re.MULTILINE)
    assert len(declared) == 8
    assert sorted(drawn) == sorted([*declared, ("completed", "absent"), ("recoverable", "absent")])


def test_the_sequences_are_drawn_from_their_steps() -> None:
    pictures = runpy.run_path(str(PICTURES / "draw.py"))["from_text"]()
    assert {name: (PICTURES / name).read_text() for name in pictures} == pictures
