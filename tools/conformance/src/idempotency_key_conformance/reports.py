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
_SECRET = ("--header", "--other-account", "--same-account")

STYLE = """
:root { color-scheme: light dark; --text: #1a1a1a; --back: #fff; --quiet: #555; --line: #ddd;
  --passed: #10672c; --failed: #b3141b; --deviates: #8a5300; }
@media (prefers-color-scheme: dark) { :root { --text: #e6e6e6; --back: #161616; --quiet: #a8a8a8; --line: #3a3a3a;
  --passed: #6fd08c; --failed: #ff8a80; --deviates: #f0b35a; } }
body { font: 15px/1.45 system-ui, sans-serif; margin: 1.5rem auto; max-width: 60rem; padding: 0 1rem;
  color: var(--text); background: var(--back); }
h1 { font-size: 1.3rem; overflow-wrap: anywhere; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .2rem 1rem; margin: 1rem 0; }
dt { color: var(--quiet); } dd { margin: 0; overflow-wrap: anywhere; min-width: 0; }
details { margin: 1rem 0; }
section { border-top: 1px solid var(--line); padding: .6rem 0; overflow-wrap: anywhere; }
h2 { font-size: 1rem; margin: 0; display: flex; justify-content: space-between; gap: 1rem; }
h2 span { white-space: nowrap; } p { margin: .2rem 0; } small { color: var(--quiet); display: block; }
.passed { color: var(--passed); } .failed { color: var(--failed); } .deviates { color: var(--deviates); }
.not-judged { color: var(--quiet); }
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
    #: How many requests a rate limit shed.
    shed: int = 0
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
        if self.shed:
            yield "shed", f"{self.shed} requests, by a rate limit or an overloaded server"
        yield "began", f"{self.began:%Y-%m-%d %H:%M:%S} UTC"
        yield "judged by", f"idempotency-key-conformance {__version__}, Python {sys.version.partition(' ')[0]}"
        yield "command", self.command

    def summary(self) -> str:
        """The closing line, for example ``checked 4: 3 passed, 1 deviates, 0 failed, 2 not judged``."""
        counts = Counter(result.verdict for result in self.results)
        checked = len(self.results) - counts[Verdict.NOT_JUDGED]
        return f"checked {checked}: {', '.join(f'{counts[verdict]} {verdict.value}' for verdict in Verdict)}"

    def findings(self) -> list[list[Result]]:
        """The results by their cause, those first that need attention. Each passed case stands alone."""
        groups: dict[tuple[Verdict, str], list[Result]] = {}
        for result in self.results:
            groups.setdefault((result.verdict, result.cause or result.case.name), []).append(result)
        return sorted(groups.values(), key=lambda group: ORDER.index(group[0].verdict))

    def as_text(self) -> str:
        """One line for each cause, which names the first case that found it; then the others."""
        lines = [f"{name:10}  {value}" for name, value in self.facts()] + [""]
        for first, *others in self.findings():
            lines.append(f"{first.verdict.value:10}  {first.case.name:33}  {first.detail}")
            if others:
                lines.append(f"{'':10}  {'':33}  also: {_names(others)}")
            if first.verdict in (Verdict.FAILED, Verdict.DEVIATES):
                lines.append(f"{'':10}  {'':33}  {first.rule.level.value}: {first.rule.source}")
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
            f"<section><h2>{escape(first.case.name)}"
            f"<span class='{first.verdict.value.replace(' ', '-')}'>{first.verdict.value}</span></h2>"
            f"<p>{escape(first.detail)}</p>{f'<p>Also: {escape(_names(others))}</p>' if others else ''}"
            f"<small>{escape(first.case.proves)} "
            f"{first.rule.level.value}: {escape(first.rule.source)}</small></section>\n"
            for first, *others in self.findings()
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


def _names(results: Sequence[Result]) -> str:
    return ", ".join(result.case.name for result in results)


def _printable(text: str) -> str:
    """Replace control characters, which XML can't represent."""
    return "".join(character if character.isprintable() else " " for character in text)
