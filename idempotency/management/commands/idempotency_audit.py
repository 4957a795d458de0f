"""``manage.py idempotency_audit``: every mutating route of the project, and whether it is protected."""

from __future__ import annotations

from collections import Counter
from json import dumps
from pathlib import Path
from typing import Any

from django.core.management.base import CommandError, CommandParser

from ...http.route_audit import Audit, AuditedRoute, Verdict, audit
from ..running import EXIT_USAGE, ExplainedCommand, require

EXIT_FOUND = 1

MEANINGS = {
    Verdict.PROTECTED: "protected",
    Verdict.BROKEN: "protected in a way that does not hold",
    Verdict.DOUBTFUL: "protected, and to be looked at",
    Verdict.UNPROTECTED: "not protected",
    Verdict.UNDECLARED: "not protected, with unknown methods",
    Verdict.IDEMPOTENT: "not protected, of a method that HTTP defines as idempotent",
    Verdict.ALLOWED: "not protected, and allowed to be",
}

FAILING = [str(verdict) for verdict in (Verdict.UNPROTECTED, Verdict.UNDECLARED, Verdict.DOUBTFUL, Verdict.BROKEN)]

LIMITS = (
    "The audit reads the URLs and the decorators, and runs nothing. It can't see whether a handler calls a provider "
    "inside its transaction, nor a claim() block within a view. assert_idempotent() of idempotency.testing shows what "
    "a view does."
)


class Command(ExplainedCommand):
    help = (
        "List every mutating route of the project: which operation protects it and how, whether something about the "
        "protection does not hold, and what is not protected."
    )
    epilog = (
        "exit codes:\n  0    no route has a verdict of --fail-on\n  1    a route has one\n"
        "  2    an argument is wrong, or a pattern allows nothing"
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
        parser.add_argument(
            "--fail-on",
            action="append",
            default=[],
            choices=FAILING,
            metavar="VERDICT",
            help=f"exit with 1 if a route has this verdict: {', '.join(FAILING)}. May be repeated",
        )
        parser.add_argument(
            "--allow",
            action="append",
            default=[],
            metavar="PATTERN",
            help="an unprotected route is intended if its path, its name or its view matches, as in a shell. May be "
            "repeated",
        )
        parser.add_argument("--allow-file", metavar="FILE", help="a file with one such pattern in each line")
        parser.add_argument("--include-admin", action="store_true", help="list the routes of Django's admin, too")

    def handle(self, *args: object, **options: Any) -> None:
        allow = [*options["allow"], *_read_patterns(options["allow_file"])]
        report = audit(allow=allow, include_admin=options["include_admin"])
        self.write(dumps(_as_json(report), indent=2) if options["json"] else _as_table(report))
        unused = ", ".join(map(repr, report.unused))
        require(not unused, f"No route matches {unused}. Correct the pattern, or remove it.")
        found = [f"{count} {verdict}" for verdict, count in _counts(report).items() if verdict in options["fail_on"]]
        if found:
            raise CommandError(f"Routes: {', '.join(found)}.", returncode=EXIT_FOUND)


def _read_patterns(name: str | None) -> list[str]:
    if name is None:
        return []
    try:
        lines = Path(name).read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise CommandError(f"--allow-file: {error}", returncode=EXIT_USAGE) from error
    return [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]


def _counts(report: Audit) -> dict[Verdict, int]:
    counts = Counter(route.verdict for route in report.routes)
    return {verdict: counts[verdict] for verdict in Verdict if counts[verdict]}


def _as_json(report: Audit) -> dict[str, Any]:
    return {
        "routes": [route.as_dict() for route in report.routes],
        "summary": {str(verdict): count for verdict, count in _counts(report).items()},
        "admin_routes_left_out": report.admin_routes,
    }


def _as_table(report: Audit) -> str:
    rows = [(route.method, route.route, str(route.verdict), _how(route)) for route in report.routes]
    widths = [max((len(row[column]) for row in rows), default=0) for column in range(3)]
    lines = []
    for route, row in zip(report.routes, rows, strict=True):
        cells = [f"{text:{width}}" for text, width in zip(row, widths, strict=False)]
        lines.append("  ".join([*cells, row[3]]))
        lines += [f"{'':{widths[0]}}  {reason}" for reason in route.reasons]
    lines += ["", *(f"{count:>5}  {MEANINGS[verdict]}" for verdict, count in _counts(report).items())]
    if report.admin_routes:
        lines += [f"{report.admin_routes:>5}  routes of Django's admin left out (--include-admin)"]
    return "\n".join([*lines, "", LIMITS])


def _how(route: AuditedRoute) -> str:
    operation = route.operation
    if operation is None:
        return route.view
    within = "in a transaction" if operation.declared["transaction"] else "outside of a transaction"
    return f"{operation.name}: {within}, {operation.recovery.name}"
