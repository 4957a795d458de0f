"""All cases, in the order in which they are judged, and a run of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .cases import closing_cases, retry_cases
from .connections import connection_cases
from .crashes import crash_cases
from .judging import Case, Result, Trial, judge
from .requests import request_cases


def all_cases(trial: Trial, only: Sequence[str] = ()) -> list[Case]:
    """
    :param only: names of cases, or prefixes. Empty: all cases.
    """
    cases = [*retry_cases(trial), *request_cases(trial), *connection_cases(), *crash_cases(), *closing_cases()]
    return [case for case in cases if not only or case.name.startswith(tuple(only))]


def run(trial: Trial, only: Sequence[str] = ()) -> Iterator[tuple[int, Result]]:
    """Judge the cases. Yields each result and the number of cases that are left.

    :param only: as in ``all_cases``.
    """
    cases = all_cases(trial, only)
    for number, case in enumerate(cases, start=1):
        yield len(cases) - number, judge(case, trial)
