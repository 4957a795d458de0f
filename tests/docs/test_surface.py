"""``surface.txt`` lists the public surface of the code, so that a change of it is noticed. The pages have each name."""

import importlib
import re

import pytest

from idempotency.contrib.prometheus import exporter as metrics
from idempotency.http.key_headers import RETENTION_HEADER, STATUS_HEADER, STATUSES
from idempotency.http.problems import PROFILES
from idempotency.identity import keys
from idempotency.options.table import OPTIONS, SETTINGS
from tests.docs.pages import PAGES, ROOT, text_of
from tests.docs.test_public_modules import MODULES

pytestmark = pytest.mark.once

CODE = {path: path.read_text() for path in sorted((ROOT / "idempotency").rglob("*.py"))}


def everywhere(pattern):
    return {found for text in CODE.values() for found in re.findall(pattern, text)}


def surface():
    """Every promised name, by kind."""
    names = {name: importlib.import_module(name).__all__ for name in MODULES}
    answers = [answer for profile in PROFILES.values() for answer in profile.answers.values()]
    counters = [metrics.EVENTS, *metrics.COUNTS]
    return names | {
        "Options": OPTIONS,
        "Entries of IDEMPOTENCY": SETTINGS,
        "System checks, after idempotency.": everywhere(r'"idempotency\.([EW]\d{3})"'),
        "Headers": {
            *(keys.HEADER, STATUS_HEADER, RETENTION_HEADER, "Location", "Retry-After"),
            *(profile.replayed for profile in PROFILES.values()),
        },
        f"Values of {STATUS_HEADER}": {*STATUSES},
        **{
            f"Codes of problems with {status}": {answer.code for answer in answers if answer.status == status}
            for status in sorted({answer.status for answer in answers})
        },
        "Counters": [f"{name}_total" for name in counters],
        "Gauges": metrics.GAUGES,
    }


def listed():
    text = (ROOT / "tests/docs/surface.txt").read_text()
    return {kind: names.split() for kind, names in re.findall(r"^(\S.*):\n((?: .+\n)+)", text, re.MULTILINE)}


def test_the_list_is_the_surface_of_the_code():
    promised = {f"{kind}: {name}" for kind, names in listed().items() for name in names}
    found = {f"{kind}: {name}" for kind, names in surface().items() for name in names}
    assert (found - promised, promised - found) == (set(), set()), "to add to surface.txt, and to take away"
    assert [names for names in listed().values() if names != sorted({*names})] == []


def test_the_pages_have_every_name_of_the_surface():
    words = {*re.findall(r"[\w-]+", "\n".join(map(text_of, PAGES)))}
    assert {name for names in listed().values() for name in names} - words == set()
