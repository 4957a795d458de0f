"""All cells, several at a time."""

from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from functools import partial

from tests.crash.cells import Verdict, run_cell
from tests.crash.points import Cell, excluded

#: Cells wait for leases, locks and frozen processes more than they compute.
AT_ONCE = 12


@dataclass
class Matrix:
    database: str
    verdicts: list[Verdict] = field(default_factory=list)
    #: The excluded cells, by reason.
    excluded: dict[str, list[Cell]] = field(default_factory=lambda: defaultdict(list))

    @property
    def failures(self):
        return [verdict for verdict in self.verdicts if not verdict.passed]


def run_matrix(world, cells, *, tell=lambda verdict: None, **spec):
    """Run each of ``cells`` that isn't excluded. ``tell`` gets each verdict at once; ``spec`` is for workers."""
    matrix = Matrix(world.database)
    sensible = []
    for cell in cells:
        reason = excluded(cell, world.database)
        if reason is None:
            sensible.append(cell)
        else:
            matrix.excluded[reason].append(cell)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        run = partial(_run_until_it_fires, world, spec)
        for future in as_completed([pool.submit(run, cell) for cell in sensible]):
            verdict = future.result()
            matrix.verdicts.append(verdict)
            tell(verdict)
    return matrix


def _run_until_it_fires(world, spec, cell):
    """Run a cell. Under SERIALIZABLE the server may refuse its handler before the fault, because of another cell."""
    for _ in range(5 if spec.get("level") == "SERIALIZABLE" else 1):
        verdict = run_cell(world, cell, **spec)
        if verdict.fired:
            break
    return verdict
