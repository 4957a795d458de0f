"""``python -m idempotency.conformance --url http://127.0.0.1:8000/charges/ --profile ietf --body '{"amount": 1}'``.

The exit code is 0 if no case failed, 1 if one did, and 2 if nothing could be judged.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from .cases import plain_cases
from .crashes import crash_cases
from .judging import Trial, Verdict, as_html, as_junit, as_text, judge
from .profiles import PROFILES, declare
from .target import Target

COMMANDS = ("kill", "restart", "freeze", "thaw")


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(","))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m idempotency.conformance",
        description="Judge a server that takes an Idempotency-Key. It gets real requests: never do this in production.",
    )
    add = parser.add_argument
    add("--url", required=True, help="the protected operation")
    add("--profile", required=True, choices=sorted(PROFILES))
    add("--method", default="POST")
    add("--body", required=True, help="a body that succeeds; {unique} in it is new in each operation")
    add("--other-body", help="another one that succeeds")
    add("--refused-body", help="one that the operation answers with 4xx")
    add("--crashing-body", help="one that the operation answers with 5xx")
    add("--other-url", help="another protected operation that takes the same body")
    add("--header", action="append", default=[], help="Name: value, sent with each request")
    add("--other-account", metavar="HEADER", help="the header that another account sends in place of that of --header")
    add("--count-url", help="an address that answers with the number of effects")
    add("--count-command", help="a command that prints the number of effects")
    add(
        "--duplicates",
        type=_numbers,
        default=(2, 50, 200),
        metavar="N,…",
        help="how many requests are sent at once (default: 2,50,200)",
    )
    add("--ttl", type=float, help="the retention in seconds; a case waits for its end")
    for name in COMMANDS:
        add(f"--{name}", help=f"a command that does this to the server: {name}")
    add("--timeout", type=float, default=30.0, help="seconds for one answer (default: %(default)s)")
    add("--patience", type=float, default=30.0, help="seconds for retries (default: %(default)s)")
    add(
        "--declare",
        action="append",
        default=[],
        help="name=value: what the server documents otherwise than the profile",
    )
    add("--only", action="append", default=[], help="the name of a case, or its beginning; can be repeated")
    add("--junit", type=Path, help="write the report as JUnit's XML")
    add("--html", type=Path, help="write the report as a page")
    return parser


def main(arguments: Sequence[str]) -> int:
    parser = _parser()
    options = parser.parse_args(arguments)
    profile = PROFILES[options.profile]
    try:
        for declaration in options.declare:
            profile = declare(profile, declaration)
    except ValueError as error:
        parser.error(str(error))
    target = Target(
        **{name: value for name, value in vars(options).items() if name in Target.__dataclass_fields__},
        fields=("Content-Type: application/json", *options.header),
        commands={name: value for name in COMMANDS if (value := getattr(options, name)) is not None},
    )
    trial = Trial(target, profile)
    results = [
        judge(case, trial)
        for case in (*plain_cases(trial), *crash_cases())
        if not options.only or case.name.startswith(tuple(options.only))
    ]
    sys.stdout.write(as_text(results))
    if options.junit is not None:
        options.junit.write_text(as_junit(results, profile), encoding="utf-8")
    if options.html is not None:
        options.html.write_text(as_html(results, profile, target.url), encoding="utf-8")
    verdicts = {result.verdict for result in results}
    if verdicts <= {Verdict.NOT_JUDGED}:
        return 2
    return 1 if Verdict.FAILED in verdicts else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
