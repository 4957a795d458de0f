"""The command line of the benchmarks: ``python -m tests.benchmarks --help``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from importlib import import_module

from .database import PREPARED, scratch_database

#: The module of each experiment. Its ``compare`` returns tables.
EXPERIMENTS = {
    "requests": "requests",
    "latency": "latency",
    "http": "http",
    "storm": "storm",
    "waits": "waits",
    "slow": "slow_views",
    "claims": "claim_shapes",
    "pages": "record_pages",
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks", description=__doc__)
    parser.add_argument("experiments", nargs="*", metavar="experiment", help=f"{', '.join(EXPERIMENTS)} (default: all)")
    parser.add_argument("--operations", type=int, default=600, help="of each variant (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of the order of the variants (default: %(default)s)")
    parser.add_argument(
        "--prepared",
        action="store_true",
        help="let Django bind in the server and prepare statements, as OPTIONS can tell it to",
    )
    arguments = parser.parse_args()
    if unknown := set(arguments.experiments) - set(EXPERIMENTS):
        parser.error(f"no such experiment: {', '.join(sorted(unknown))}")
    if arguments.operations < 1:
        parser.error("--operations must be at least 1")

    with scratch_database(PREPARED if arguments.prepared else {}):
        for name in arguments.experiments or EXPERIMENTS:
            # Only now, because they import models, and so need Django to be set up.
            compare = import_module(f"tests.benchmarks.{EXPERIMENTS[name]}").compare
            for table in compare(arguments.operations, arguments.seed, _progress()):
                print(f"{table}\n", flush=True)


def _progress() -> Callable[[str], None]:
    """One line that changes on a terminal, and nothing in a pipe: the tables are what is kept."""
    if not sys.stderr.isatty():
        return lambda text: None
    return lambda text: print(f"\r{text:<60}\r", end="", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
