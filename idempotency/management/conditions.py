"""Conditions under which a command fails, so that a cron job or a health check can watch a number."""

from __future__ import annotations

import operator
import re
from argparse import ArgumentTypeError
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import ClassVar

from django.core.management.base import CommandError

from ..upkeep.stats import Number, Precision
from .running import EXIT_USAGE


@dataclass(frozen=True)
class Condition:
    """A comparison of one number, such as ``parked > 0``, under which the command fails."""

    OPERATORS: ClassVar[dict[str, Callable[[float, float], bool]]] = {
        ">": operator.gt,
        ">=": operator.ge,
        "<": operator.lt,
        "<=": operator.le,
        "==": operator.eq,
        "!=": operator.ne,
    }
    FORM: ClassVar[re.Pattern[str]] = re.compile(r"\s*(\w+)\s*(>=|<=|==|!=|>|<)\s*(\d+(?:\.\d+)?)\s*", re.ASCII)

    name: str
    sign: str
    bound: float

    @classmethod
    def parser(cls, names: Collection[str]) -> Callable[[str], Condition]:
        """A function that reads a condition on one of the numbers ``names``, for argparse."""

        def parse(text: str) -> Condition:
            found = cls.FORM.fullmatch(text)
            if found is None:
                raise ArgumentTypeError(
                    f"{text!r} is not a comparison. Write a name, one of {' '.join(cls.OPERATORS)}, and a number, such "
                    f"as 'parked > 0'."
                )
            name, sign, bound = found.groups()
            if name not in names:
                raise ArgumentTypeError(f"there is no number {name!r}. The numbers are {', '.join(names)}.")
            return cls(name, sign, float(bound))

        return parse

    def __str__(self) -> str:
        return f"{self.name} {self.sign} {self.bound:g}"

    def holds(self, number: Number) -> bool:
        """Whether the comparison is true, or may be true of a number that was counted up to a bound only.

        It is false if there is nothing to measure.

        :raises CommandError: the database can't tell the number.
        """
        if number.kind is Precision.UNKNOWN:
            raise CommandError(
                f"This database can't tell {self.name}, so {str(self)!r} can't be checked.", returncode=EXIT_USAGE
            )
        if number.value is None:
            return False
        if number.kind is Precision.AT_LEAST:
            if self.sign in {">", ">=", "!="}:
                return True
            if self.sign == "==":
                return number.value <= self.bound
        return self.OPERATORS[self.sign](number.value, self.bound)
