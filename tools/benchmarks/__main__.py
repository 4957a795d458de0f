"""``python -m tools.benchmarks``: measure the cost of protection, and print tables in Markdown."""

from __future__ import annotations

import argparse
import sys
from functools import partial
from importlib import import_module

from tests.results import note

from .database import PREPARED, scratch_database

#: The experiments' modules, whose ``compare`` returns tables.
EXPERIMENTS = ("requests", "latency", "http", "storm", "purge", "upkeep")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.benchmarks", description=__doc__)
    parser.add_argument("experiments", nargs="*", metavar="experiment", help=f"{', '.join(EXPERIMENTS)} (default: all)")
    parser.add_argument("--operations", type=int, default=600, help="operations of each variant (default: %(default)s)")
    parser.add_argument(
        "--rows",
        type=int,
        default=2_000_000,
        help="rows of the purged table, and of the larger table of upkeep (default: %(default)s)",
    )
    parser.add_argument("--seed", type=int, default=1, help="seed of the order of the variants (default: %(default)s)")
    parser.add_argument(
        "--prepared",
        action="store_true",
        help="use server-side binding and prepared statements",
    )
    arguments = parser.parse_args()
    if unknown := set(arguments.experiments) - set(EXPERIMENTS):
        parser.error(f"no such experiment: {', '.join(sorted(unknown))}")
    if arguments.operations < 1 or arguments.rows < 1000:
        parser.error("--operations must be at least 1, and --rows at least 1000")

    with scratch_database(PREPARED if arguments.prepared else {}):
        for name in arguments.experiments or EXPERIMENTS:
            # Imported here, because models can only be imported after django.setup().
            compare = import_module(f"tools.benchmarks.{name}").compare
            number = arguments.rows if name in {"purge", "upkeep"} else arguments.operations
            for table in compare(number, arguments.seed, partial(print, file=sys.stderr)):
                print(f"{table}\n", flush=True)
                note("costs", title=table.title, headings=table.headings, cells=table.rows, rows=len(table.rows))


if __name__ == "__main__":
    main()
