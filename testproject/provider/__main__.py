"""``python -m testproject.provider``: run the stand-in payment provider on loopback until it is stopped."""

import argparse
import sys
from contextlib import closing
from pathlib import Path

from .ledger import Ledger
from .server import Provider


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m testproject.provider", description=__doc__)
    parser.add_argument("--ledger", type=Path, required=True, help="the file to append effects to")
    parser.add_argument("--port", type=int, default=0, help="the port on 127.0.0.1; 0 selects a free one")
    parser.add_argument(
        "--deduplicate",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="pay once per key (default: each request pays)",
    )
    options = parser.parse_args()
    with closing(Ledger(options.ledger)) as ledger:
        provider = Provider(options.port, ledger, deduplicate=options.deduplicate)
        print(f"http://127.0.0.1:{provider.server_address[1]}", flush=True)
        try:
            provider.serve_forever()
        except KeyboardInterrupt:
            sys.exit(130)


if __name__ == "__main__":
    main()
