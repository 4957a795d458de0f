"""The command line of the benchmarks: ``python -m tools.benchmarks --help``."""

from __future__ import annotations

import argparse
import sys
from functools import partial
from importlib import import_module

from .database import PREPARED, scratch_database

#: The modules of the experiments. Their ``compare`` returns tables.
EXPERIMENTS = ("requests", "latency", "http", "storm", "purge")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.benchmarks", description=__doc__)
    parser.add_argument("experiments", nargs="*", metavar="experiment", help=f"{', '.join(EXPERIMENTS)} (default: all)")
    parser.add_argument("--operations", type=int, default=600, help="of each variant (default: %(default)s)")
    parser.add_argument("--rows", type=int, default=2_000_000, help="of the purged table (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of the order of the variants (default: %(default)s)")
    parser.add_argument(
        "--prepared",
        action="store_true",
        help="let Django bind in the server and prepare statements, as OPTIONS can tell it to",
    )
    arguments = parser.parse_args()
    if unknown := set(arguments.experiments) - set(EXPERIMENTS):
        parser.error(f"no such experiment: {', '.join(sorted(unknown))}")
    if arguments.operations < 1 or arguments.rows < 1000:
        parser.error("--operations must be at least 1, and --rows at least 1000")

    with scratch_database(PREPARED if arguments.prepared else {}):
        for name in arguments.experiments or EXPERIMENTS:
            # Only now, because they import models, and so need Django to be set up.
            compare = import_module(f"tools.benchmarks.{name}").compare
            number = arguments.rows if name == "purge" else arguments.operations
            for table in compare(number, arguments.seed, partial(print, file=sys.stderr)):
                print(f"{table}\n", flush=True)


if __name__ == "__main__":
    main()
