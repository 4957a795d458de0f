"""The command line of the experiments with large tables: ``python -m tests.scale --help``."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from importlib import import_module

from tests.benchmarks.database import PARAMETERS, scratch_database

#: The module of each experiment. Its ``compare`` returns tables. They run in this order and share one table of records.
EXPERIMENTS = {
    "growth": "growth",
    "admin": "admin_pages",
    "purge": "purging",
    "layouts": "layouts",
    "partitions": "partitions",
}

# The log may grow, so that only the experiments' own checkpoints happen, and the cache holds what a server of this
# size would hold. Nothing of the table's maintenance happens by itself.
SERVER = {**PARAMETERS, "shared_buffers": "2GB", "max_wal_size": "12GB", "maintenance_work_mem": "512MB"}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.scale", description=__doc__)
    parser.add_argument(
        "experiments", nargs="+", choices=EXPERIMENTS, metavar="experiment", help=", ".join(EXPERIMENTS)
    )
    parser.add_argument("--rows", type=int, default=10_000_000, help="of the largest table (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of the order of the variants (default: %(default)s)")
    arguments = parser.parse_args()
    if arguments.rows < 1000:
        parser.error("--rows must be at least 1000")

    with scratch_database({}, SERVER):
        for name in EXPERIMENTS:
            if name not in arguments.experiments:
                continue
            # Only now, because they import models, and so need Django to be set up.
            compare = import_module(f"tests.scale.{EXPERIMENTS[name]}").compare
            for table in compare(arguments.rows, arguments.seed, _progress()):
                print(f"{table}\n", flush=True)
            load = os.getloadavg()[-1]
            print(f"Load average of the last 15 minutes: {load:.1f} on {os.cpu_count()} cores.\n", flush=True)


def _progress() -> Callable[[str], None]:
    """Lines on the error output, because an experiment may take an hour."""
    start = time.monotonic()
    return lambda text: print(f"{time.monotonic() - start:6.0f} s  {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
