"""What should have happened, compared with what has happened, counted where effects happen and never from answers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Effects:
    """What was found. Each of the lists names what is wrong, and is empty if nothing is."""

    #: How many effects there should be, and how many there are.
    expected: int
    count: int
    #: What had more than one effect.
    doubled: list[str]
    #: What was acknowledged and has no effect.
    lost: list[str]
    #: What took effect and should not have: it was rolled back, or nobody has asked for it.
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
    """Compare what was found with what should be there once each.

    :param found: how often each effect was found, by its name.
    :param expected: the names of the effects that there should be.
    :param acknowledged: those of them that somebody was told of, and so must be there; by default all of them.
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
