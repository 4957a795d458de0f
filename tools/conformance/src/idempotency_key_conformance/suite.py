"""All cases, in the order in which they are judged."""

from __future__ import annotations

from collections.abc import Sequence

from .cases import closing_cases, retry_cases
from .connections import connection_cases
from .crashes import crash_cases
from .judging import Case, Trial
from .requests import request_cases


def all_cases(trial: Trial, only: Sequence[str] = ()) -> list[Case]:
    """
    :param only: names of cases, or prefixes. Empty: all cases.
    """
    cases = [*retry_cases(trial), *request_cases(trial), *connection_cases(), *crash_cases(), *closing_cases()]
    return [case for case in cases if not only or case.name.startswith(tuple(only))]
