"""A private MariaDB server, alongside any that the machine runs. A system package provides the programs."""

import os
import subprocess
from contextlib import contextmanager

from testproject.harness.processes import Daemon, answers, free_port, short_directory
from tests.harness.servers import find_program


@contextmanager
def running_mariadb():
    """The URL of an empty database of the user ``root``, who needs no password on the loopback interface."""
    owner = ["--user=root"] if os.geteuid() == 0 else []
    with short_directory("mariadb-") as directory:
        data, port = directory / "data", free_port()
        program = find_program("mariadb-install-db", "mariadb")
        install = [program, "--no-defaults", f"--datadir={data}", "--skip-test-db", *owner]
        subprocess.run([*install, "--auth-root-authentication-method=normal"], check=True, capture_output=True)
        # The server's default character set can't hold every text.
        (directory / "create.sql").write_text("CREATE DATABASE app CHARACTER SET latin1;\n")
        command = [find_program("mariadbd", "mariadb"), "--no-defaults", f"--datadir={data}"]
        command += [
            f"--init-file={directory / 'create.sql'}",
            f"--socket={directory / 'socket'}",
            "--bind-address=127.0.0.1",
            f"--port={port}",
            *owner,
        ]
        command += ["--default-time-zone=+05:30"]  # the clock must not be the session's
        command += ["--character-set-server=latin1", "--max-connections=300", "--skip-name-resolve"]
        command += ["--idle-transaction-timeout=5"]  # in seconds, as docs/reference/databases.md advises
        with Daemon("mariadb", command, directory, is_ready=lambda: answers(("127.0.0.1", port))):
            yield f"mysql://root@127.0.0.1:{port}/app"
