"""Compares expected and actual effects, which are counted where they happen, never from responses."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Effects:
    """The numbers of expected and actual effects, and the names of the wrong ones."""

    expected: int
    count: int
    doubled: list[str]
    lost: list[str]  # acknowledged without an effect
    ghosts: list[str]  # rolled back or never requested, with an effect

    @property
    def examples(self) -> list[str]:
        return [
            f"{kind}: {name}"
            for kind, names in (("doubled", self.doubled), ("lost", self.lost), ("not requested", self.ghosts))
            for name in names[:3]
        ]


def judge_effects(
    found: Mapping[str, int], expected: Iterable[str], acknowledged: Iterable[str] | None = None
) -> Effects:
    """Compare how often each effect was found with the names of the effects that should exist once.

    :param acknowledged: the names that were acknowledged to clients, so that their effects must exist. By default, all
        expected names.
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
