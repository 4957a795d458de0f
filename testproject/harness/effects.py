"""Compares what should have happened with what has happened, counted where effects happen and never from responses."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Effects:
    """The result of a comparison. Each list names what is wrong, and is empty if nothing is wrong."""

    #: How many effects there should be, and how many there are.
    expected: int
    count: int
    #: The names that have more than one effect.
    doubled: list[str]
    #: The names that were acknowledged and have no effect.
    lost: list[str]
    #: The names that have an effect and should not, because they were rolled back or never requested.
    ghosts: list[str]

    @property
    def examples(self) -> list[str]:
        return [
            f"{kind}: {name}"
            for kind, names in (("doubled", self.doubled), ("lost", self.lost), ("not asked for", self.ghosts))
            for name in names[:3]
        ]


def judge_effects(
    found: Mapping[str, int], expected: Iterable[str], acknowledged: Iterable[str] | None = None
) -> Effects:
    """Compare the effects that were found with those that should each exist once.

    :param found: how often each effect was found, by name.
    :param expected: the names of the effects that there should be.
    :param acknowledged: the names that were acknowledged to somebody, and so must exist; by default all expected names.
    """
    wanted = set(expected)
    present = {name: number for name, number in found.items() if number}
    return Effects(
        expected=len(wanted),
        count=sum(present.values()),
        doubled=sorted(name for name, number in present.items() if number > 1),
        lost=sorted((wanted if acknowledged is None else set(acknowledged)) - set(present)),
        ghosts=sorted(set(present) - wanted),
    )
