"""``manage.py idempotency_audit``: list the mutating routes of the project and their protection."""

from __future__ import annotations

from collections import Counter
from json import dumps
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from ...operate.statistics import Number
from ...views.route_audit import Audit, AuditedRoute, Verdict, audit
from ..running import check_database, count_undeclared, lines_about_undeclared, refusals_as_errors, require

EXIT_FOUND = 1

MEANINGS = {
    Verdict.PROTECTED: "protected",
    Verdict.BROKEN: "protected, but not effectively",
    Verdict.DOUBTFUL: "protected, but needs a review",
    Verdict.UNPROTECTED: "not protected",
    Verdict.UNDECLARED: "not protected, methods unknown",
    Verdict.IDEMPOTENT: "not protected, idempotent by HTTP's definition",
    Verdict.ALLOWED: "not protected, as allowed",
}

FAILING = [str(verdict) for verdict in (Verdict.UNPROTECTED, Verdict.UNDECLARED, Verdict.DOUBTFUL, Verdict.BROKEN)]

LIMITS = (
    "The audit reads URLs and decorators, and runs nothing. It can't detect a provider call inside a transaction or a "
    "claim() block within a view. Use assert_idempotent() of idempotency.testing to test what a view does."
)


class Command(BaseCommand):
    help = (
        "List every mutating route of the project, the operation that protects it, and whether the protection is "
        "effective. Exit codes: 0 no route has a verdict of --fail-on, 1 a route has one, 2 invalid argument, or a "
        "pattern that matches no route."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
        parser.add_argument(
            "--fail-on",
            action="append",
            default=[],
            choices=FAILING,
            metavar="VERDICT",
            help=f"exit with 1 if a route has this verdict: {', '.join(FAILING)}; repeatable",
        )
        parser.add_argument(
            "--allow",
            action="append",
            default=[],
            metavar="PATTERN",
            help="accept an unprotected route if its path, name or view matches this shell pattern; repeatable",
        )
        parser.add_argument("--include-admin", action="store_true", help="also list the routes of Django's admin")
        parser.add_argument(
            "--database",
            metavar="ALIAS",
            help="also list operations that recent records there name and no code declares",
        )

    def handle(self, *args: object, **options: Any) -> None:
        report = audit(allow=options["allow"], include_admin=options["include_admin"])
        using, undeclared = options["database"], None
        if using is not None:
            check_database(using)
            with refusals_as_errors(using, ""):
                undeclared = count_undeclared(using)
        if options["json"]:
            self.stdout.write(dumps(_as_json(report, undeclared), indent=2))
        else:
            self.stdout.write(_as_table(report, undeclared))
        unused = ", ".join(map(repr, report.unused))
        require(not unused, f"No route matches {unused}. Correct the pattern, or remove it.")
        found = [f"{count} {verdict}" for verdict, count in _counts(report).items() if verdict in options["fail_on"]]
        if found:
            raise CommandError(f"Routes: {', '.join(found)}.", returncode=EXIT_FOUND)


def _counts(report: Audit) -> dict[Verdict, int]:
    counts = Counter(route.verdict for route in report.routes)
    return {verdict: counts[verdict] for verdict in Verdict if counts[verdict]}


def _as_json(report: Audit, undeclared: Number | None) -> dict[str, Any]:
    return {
        **({} if undeclared is None else {"undeclared_operations": undeclared.by_operation}),
        "routes": [route.as_dict() for route in report.routes],
        "summary": {str(verdict): count for verdict, count in _counts(report).items()},
        "admin_routes_left_out": report.admin_routes,
    }


def _as_table(report: Audit, undeclared: Number | None) -> str:
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
    if undeclared is not None:
        lines += ["", *lines_about_undeclared(undeclared)]
    return "\n".join([*lines, "", LIMITS])


def _how(route: AuditedRoute) -> str:
    operation = route.operation
    if operation is None:
        return route.view
    within = "in a transaction" if operation.declared["transaction"] else "outside of a transaction"
    return f"{operation.name}: {within}, {operation.recovery.name}"
