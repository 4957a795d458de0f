"""A MariaDB server of one's own, beside any that the machine runs. A package of the system brings the programs."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

from testproject.harness.processes import Daemon, answers, free_port, short_directory

#: Servers are often installed where only root looks.
PLACES = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/usr/libexec"])


def _find(program: str) -> str:
    """:raises RuntimeError: it is not installed. The message says what to install."""
    if (found := shutil.which(program, path=PLACES)) is None:
        raise RuntimeError(f"No {program} was found. As root, on Debian or Ubuntu: tests/servers.sh install mariadb")
    return found


@contextmanager
def running_mariadb() -> Iterator[str]:
    """A server with an empty database of the user ``root``, who needs no password on the loopback interface.

    :returns: the database's URL.
    """
    owner = ["--user=root"] if os.geteuid() == 0 else []
    with short_directory("mariadb-") as directory:
        data, port = directory / "data", free_port()
        install = [_find("mariadb-install-db"), "--no-defaults", f"--datadir={data}", "--skip-test-db", *owner]
        subprocess.run([*install, "--auth-root-authentication-method=normal"], check=True, capture_output=True)
        # The server's own character set is one that can't hold every text.
        (directory / "create.sql").write_text("CREATE DATABASE app CHARACTER SET latin1;\n")
        command = [_find("mariadbd"), "--no-defaults", f"--datadir={data}", f"--init-file={directory / 'create.sql'}"]
        command += [f"--socket={directory / 'socket'}", "--bind-address=127.0.0.1", f"--port={port}", *owner]
        command += ["--character-set-server=latin1", "--max-connections=300", "--skip-name-resolve"]
        command += ["--idle-transaction-timeout=5"]  # in seconds, as docs/reference/databases.md advises
        with Daemon("mariadb", command, directory, is_ready=lambda: answers(("127.0.0.1", port))):
            yield f"mysql://root@127.0.0.1:{port}/app"
