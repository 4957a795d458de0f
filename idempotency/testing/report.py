"""``Report``: what ``assert_idempotent`` found out."""

from __future__ import annotations

from dataclasses import dataclass, field


class Broken(Exception):  # noqa: N818 - a finding, not an error
    """A check's finding: a promise is broken.

    :param what: what happened.
    :param mend: how to mend it.
    """

    def __init__(self, what: str, mend: str) -> None:
        super().__init__(what)
        self.what = what
        self.mend = mend


class NotRun(Exception):  # noqa: N818 - a finding, not an error
    """A check's finding: it could not be run, so nothing is known."""


@dataclass
class Report:
    """What ``assert_idempotent`` found out about one request. ``str()`` of it is for people."""

    request: str
    """The method and the path."""

    kept: list[str] = field(default_factory=list)
    """The names of the checks that found nothing wrong."""

    broken: dict[str, Broken] = field(default_factory=dict)
    """For each promise that broke, by the name of its check: ``what`` happened and how to ``mend`` it."""

    not_run: dict[str, str] = field(default_factory=dict)
    """For each check that could not be run, by its name: why."""

    left_out: list[str] = field(default_factory=list)
    """The names of the checks that the caller left out."""

    def __str__(self) -> str:
        count = len(self.broken)
        lines = [f"{self.request} is not safe to retry: {count} of its promises broke." if count else self.request]
        advised: dict[str, str] = {}
        for name, finding in self.broken.items():
            earlier = advised.setdefault(finding.mend, name)
            lines += ["", f"{name}: {finding.what}", f"    {finding.mend if earlier == name else f'As for {earlier}.'}"]
        for title, names in (("Kept", self.kept), ("Left out", self.left_out)):
            if names:
                lines += ["", f"{title}: {', '.join(names)}"]
        if self.not_run:
            lines += ["", "Not run:", *(f"  {name}: {reason}" for name, reason in self.not_run.items())]
        return "\n".join(lines)
