"""The report of a run, as text, as JUnit XML, and as a self-contained HTML page."""

from __future__ import annotations

import shlex
import sys
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from html import escape

from . import __version__
from .judging import Result, Verdict
from .profiles import Profile

#: The order on the page: verdicts that need attention first.
ORDER = (Verdict.FAILED, Verdict.DEVIATES, Verdict.NOT_JUDGED, Verdict.PASSED)
#: Options whose values may hold a secret.
_SECRET = ("--header", "--other-account")

STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 1.5rem auto; max-width: 60rem; padding: 0 1rem; color: #1a1a1a; }
h1 { font-size: 1.3rem; overflow-wrap: anywhere; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .2rem 1rem; margin: 1rem 0; }
dt { color: #555; } dd { margin: 0; overflow-wrap: anywhere; min-width: 0; }
details { margin: 1rem 0; }
section { border-top: 1px solid #ddd; padding: .6rem 0; overflow-wrap: anywhere; }
h2 { font-size: 1rem; margin: 0; display: flex; justify-content: space-between; gap: 1rem; }
h2 span { white-space: nowrap; } p { margin: .2rem 0; } small { color: #555; display: block; }
.passed { color: #10672c; } .failed { color: #b3141b; } .deviates { color: #8a5300; } .not-judged { color: #555; }
@media (max-width: 30rem) { dl { display: block; } dd { margin-bottom: .4rem; } }
"""


def printable(arguments: Sequence[str]) -> str:
    """The command line, without the values of header fields."""
    shown, is_secret = [], False
    for argument in arguments:
        option, equals, value = argument.partition("=")
        if is_secret or (equals and option in _SECRET):
            hidden = f"{(argument if is_secret else value).partition(':')[0]}: …"
            argument = hidden if is_secret else f"{option}={hidden}"
        is_secret = argument in _SECRET
        shown.append(argument)
    return f"idempotency-key-conformance {shlex.join(shown)}"


@dataclass(frozen=True, kw_only=True)
class Report:
    """The results of a run, with its circumstances."""

    results: Sequence[Result]
    profile: Profile
    url: str
    #: The ``--declare`` options.
    declared: Sequence[str]
    #: How effects were counted.
    counted: str
    command: str
    began: datetime = field(default_factory=lambda: datetime.now(UTC))

    @property
    def has_failed(self) -> bool:
        return any(result.verdict is Verdict.FAILED for result in self.results)

    def facts(self) -> Iterator[tuple[str, str]]:
        """The circumstances needed to understand or repeat the run, as names and values."""
        yield "server", self.url
        yield "profile", f"{self.profile.name}, {self.profile.document}"
        yield "declared", ", ".join(self.declared) or "nothing"
        yield "effects", self.counted
        yield "began", f"{self.began:%Y-%m-%d %H:%M:%S} UTC"
        yield "judged by", f"idempotency-key-conformance {__version__}, Python {sys.version.partition(' ')[0]}"
        yield "command", self.command

    def summary(self) -> str:
        """The closing line, for example ``checked 4: 3 passed, 1 deviates, 0 failed, 2 not judged``."""
        counts = Counter(result.verdict for result in self.results)
        checked = len(self.results) - counts[Verdict.NOT_JUDGED]
        return f"checked {checked}: {', '.join(f'{counts[verdict]} {verdict.value}' for verdict in Verdict)}"

    def as_text(self) -> str:
        lines = [f"{name:10}  {value}" for name, value in self.facts()] + [""]
        for result in self.results:
            lines.append(f"{result.verdict.value:10}  {result.case.name:33}  {result.detail}")
            if result.verdict in (Verdict.FAILED, Verdict.DEVIATES):
                lines.append(f"{'':10}  {'':33}  {result.rule.level.value}: {result.rule.source}")
        return "\n".join([*lines, "", self.summary(), ""])

    def as_junit(self) -> str:
        """The report as JUnit XML. JUnit has no deviations: they are reported as skipped, with the reason."""
        counts = Counter(result.verdict for result in self.results)
        numbers = {
            "tests": len(self.results),
            "failures": counts[Verdict.FAILED],
            "skipped": counts[Verdict.NOT_JUDGED] + counts[Verdict.DEVIATES],
        }
        suite = ET.Element(
            "testsuite",
            {"name": f"conformance.{self.profile.name}", "timestamp": f"{self.began:%Y-%m-%dT%H:%M:%S}"}
            | {name: str(value) for name, value in numbers.items()},
        )
        properties = ET.SubElement(suite, "properties")
        for name, value in self.facts():
            ET.SubElement(properties, "property", {"name": name, "value": _printable(value)})
        for result in self.results:
            attributes = {"classname": self.profile.name, "name": result.case.name, "time": f"{result.seconds:.3f}"}
            element = ET.SubElement(suite, "testcase", attributes)
            text = _printable(f"{result.verdict.value}: {result.detail}")
            if result.verdict is Verdict.PASSED:
                ET.SubElement(element, "system-out").text = text
            else:
                tag = "failure" if result.verdict is Verdict.FAILED else "skipped"
                source = f"{result.rule.level.value}: {result.rule.source}"
                ET.SubElement(element, tag, {"message": text}).text = source
        ET.indent(suite)
        return ET.tostring(suite, encoding="unicode", xml_declaration=True) + "\n"

    def as_html(self) -> str:
        facts = "".join(f"<dt>{name}</dt><dd>{escape(value)}</dd>\n" for name, value in self.facts())
        cases = "".join(
            f"<section><h2>{escape(result.case.name)}"
            f"<span class='{result.verdict.value.replace(' ', '-')}'>{result.verdict.value}</span></h2>"
            f"<p>{escape(result.detail)}</p><small>{escape(result.case.proves)} "
            f"{result.rule.level.value}: {escape(result.rule.source)}</small></section>\n"
            for result in sorted(self.results, key=lambda result: ORDER.index(result.verdict))
        )
        title = f"Idempotency-Key conformance: {escape(self.url)}"
        how = f"Profile {self.profile.name}, declared {', '.join(self.declared) or 'nothing'}, {self.began:%Y-%m-%d}"
        return (
            "<!doctype html>\n<html lang='en'><head><meta charset='utf-8'>"
            "<meta name='viewport' content='width=device-width, initial-scale=1'>"
            f"<title>{title}</title><style>{STYLE}</style></head><body><h1>{title}</h1>\n"
            f"<p>{self.summary()}</p>\n<details><summary>{escape(how)}</summary><dl>\n{facts}</dl></details>\n"
            f"{cases}</body></html>\n"
        )


def _printable(text: str) -> str:
    """Replace control characters, which XML can't represent."""
    return "".join(character if character.isprintable() else " " for character in text)
