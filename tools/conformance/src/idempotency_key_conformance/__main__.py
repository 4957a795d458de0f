"""``idempotency-key-conformance --url http://127.0.0.1:8000/charges/ --profile ietf --body '{"amount": 1}'``.

The exit code is 0 if no case failed, 1 if one did, and 2 if nothing could be judged. With ``--strict``, a deviation is
a failure.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from .judging import Result, Verdict
from .preflight import UnjudgeableError, prepare
from .profiles import DECLARABLE, PROFILES, declare
from .reports import Report, printable
from .suite import run
from .target import Target

COMMANDS = ("kill", "restart", "freeze", "thaw")


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(","))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="idempotency-key-conformance",
        description="Judge a server that accepts an Idempotency-Key. Sends real requests: never run it in production.",
    )
    add = parser.add_argument
    add("--url", required=True, help="the protected operation")
    add("--profile", required=True, choices=sorted(PROFILES))
    add("--method", default="POST")
    add("--body", required=True, help="a body that succeeds; {unique} is replaced by a new value for each operation")
    add("--other-body", help="a different body that succeeds")
    add("--refused-body", help="a body that the operation answers with 4xx")
    add("--crashing-body", help="a body that the operation answers with 5xx")
    add("--throttled-body", help="a body that the operation answers with 429")
    add("--unavailable-body", help="a body that the operation answers with 503")
    add("--other-url", help="another protected operation that accepts the same body")
    add("--header", action="append", default=[], help="Name: value, sent with each request; overrides a default")
    add("--other-account", metavar="HEADER", help="another account's header; replaces the --header of the same name")
    add("--same-account", metavar="HEADER", help="another credential of the same account, as a header")
    add("--count-url", help="a URL that shows the number of effects, possibly among other numbers")
    add("--count-command", help="a command that prints the number of effects")
    add(
        "--duplicates",
        type=_numbers,
        default=(2, 50, 200),
        metavar="N,…",
        help="how many requests to send at once (default: 2,50,200)",
    )
    add("--ttl", type=float, help="the retention in seconds; one case waits for its end")
    for name in COMMANDS:
        add(f"--{name}", help=f"a command to {name} the server")
    add("--timeout", type=float, default=30.0, help="seconds to wait for an answer (default: %(default)s)")
    add("--patience", type=float, default=120.0, help="seconds to retry; longer than a lock (default: %(default)s)")
    add(
        "--declare",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help=f"a documented difference from the profile: {', '.join(DECLARABLE)}",
    )
    add("--only", action="append", default=[], help="the name of a case, or a prefix; can be repeated")
    add("--strict", action="store_true", help="treat a deviation as a failure")
    add("--junit", type=Path, help="write the report as JUnit XML")
    add("--html", type=Path, help="write the report as an HTML page")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """
    :param arguments: of the command line; by default this process's.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = _parser()
    options = parser.parse_args(arguments)
    profile = PROFILES[options.profile]
    try:
        for declaration in options.declare:
            profile = declare(profile, declaration)
    except ValueError as error:
        parser.error(str(error))
    given = {name: value for name, value in vars(options).items() if name in Target.__dataclass_fields__}
    names = {field.partition(":")[0].strip().lower() for field in options.header}
    target = Target(
        **given,
        fields=(*([] if "content-type" in names else ["Content-Type: application/json"]), *options.header),
        commands={name: value for name in COMMANDS if (value := getattr(options, name)) is not None},
    )
    began = datetime.now(UTC)
    try:
        trial = prepare(target, profile)
    except UnjudgeableError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    results = []
    for left, judged in run(trial, options.only):
        result = _strictly(judged, options.strict)
        results.append(result)
        _show_progress(result, left)
    report = Report(
        results=results,
        profile=profile,
        url=target.url,
        declared=options.declare,
        counted="by the counter" if target.is_counted else "no counter: results are compared by their bodies",
        shed=trial.shed,
        command=printable(arguments),
        began=began,
    )
    sys.stdout.write(report.as_text())
    if options.junit is not None:
        options.junit.write_text(report.as_junit(), encoding="utf-8")
    if options.html is not None:
        options.html.write_text(report.as_html(), encoding="utf-8")
    if {result.verdict for result in results} <= {Verdict.NOT_JUDGED}:
        return 2
    return 1 if report.has_failed else 0


def _show_progress(result: Result, left: int) -> None:
    """Write one line for each case to stderr. On a terminal, a line replaces the one before."""
    line = f"{result.verdict.value:10}  {result.case.name}, {left} left"
    sys.stderr.write(f"\r\033[K{line if left else ''}" if sys.stderr.isatty() else f"{line}\n")
    sys.stderr.flush()


def _strictly(result: Result, is_strict: bool) -> Result:
    if is_strict and result.verdict is Verdict.DEVIATES:
        return dataclasses.replace(result, verdict=Verdict.FAILED)
    return result


if __name__ == "__main__":
    sys.exit(main())
