"""The tutorial, typed in as written: from an empty directory to a transfer that survives the server's death.

The reader's packages are already installed here. The server gets a free port, and the lease is back-dated instead of
waiting for its end.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from testproject.harness.processes import Daemon, answers, free_port
from tests.docs.pages import FENCED, ROOT, text_of

PAGE = "tutorial/index.md"
SERVER = "manage.py runserver --noreload"
END_OF_OUTPUT = "== end of output =="
#: Replaces `sleep 10`: the lease of the crashed request is over.
BACK_DATE = """python -c "
import sqlite3
with sqlite3.connect('db.sqlite3') as database:
    database.execute('UPDATE idempotency_record SET lease_expires_at = created_at WHERE lease_expires_at IS NOT NULL')
" """

pytestmark = pytest.mark.sqlite


class Reader:
    """A shell in the directory of the tutorial's project, and the project's server."""

    def __init__(self, directory):
        self.directory, self.port = directory, free_port()
        # Development mode would double the time of each command.
        others = ("DJANGO_", "COVERAGE_", "PYTHONDEVMODE")
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(others)}
        self.environment = inherited | {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "PYTHONWARNINGS": "",
        }
        piped = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        self.shell = subprocess.Popen(["bash"], cwd=directory, env=self.environment, **piped)
        self.server = None

    def run(self, command):
        self.shell.stdin.write(f"{command.replace('8000', str(self.port))}\necho; echo '{END_OF_OUTPUT}'\n")
        self.shell.stdin.flush()
        lines = []
        for line in self.shell.stdout:
            if line.rstrip("\r\n") == END_OF_OUTPUT:
                return lines
            lines.append(line.rstrip("\r\n"))
        raise AssertionError(f"the shell has ended: {lines}")

    def write(self, file, source):
        path = self.directory / file
        before = path.read_text() if file.endswith("settings.py") else ""
        path.write_text(before + source.replace("timedelta(seconds=10)", "timedelta(seconds=600)"))

    def start_server(self, command):
        self.stop_server()
        start = f"env -u DJANGO_SETTINGS_MODULE -u COVERAGE_PROCESS_START {sys.executable} {self.directory}/{SERVER}"
        environment = self.environment | ({"CRASH": "1"} if command.startswith("CRASH=1 ") else {})
        ready = lambda: answers(("127.0.0.1", self.port))  # noqa: E731
        words = [*start.split(), f"127.0.0.1:{self.port}"]
        self.server = Daemon("server", words, self.directory, environment=environment, is_ready=ready)
        self.server.start()

    def stop_server(self):
        if self.server is not None:
            self.server.stop()


def commands_and_output(text):
    """A console block's commands, each with its expected lines of output."""
    commands = []
    for line in text.splitlines():
        if line.startswith("$ "):
            commands.append((line[2:], []))
        else:
            commands[-1][1].append(line)
    return commands


def test_the_tutorial_works_as_written(tmp_path):
    reader = Reader(tmp_path)
    compared = 0
    try:
        for language, text in FENCED.findall(text_of(PAGE)):
            if language == "python":
                file = re.match(r"# (\S+)\n", text)
                assert file, text
                reader.write(file[1], text)
            elif SERVER in text:
                reader.start_server(text)
            elif language == "sh":
                # This virtual environment already has the package installed.
                reader.run(re.sub(r"(?m)^(mkdir|python3 -m venv|pip install) .*\n", "", text))
            else:
                for command, printed in commands_and_output(text):
                    output = reader.run(BACK_DATE if command.startswith("sleep ") else command)
                    # Since Python 3.13, 422 has the reason phrase of RFC 9110.
                    output = [seen.replace("Unprocessable Content", "Unprocessable Entity") for seen in output]
                    for line in printed:
                        start = line.partition("…")[0]
                        assert any(seen.startswith(start) for seen in output), (command, line, output)
                        compared += 1
    finally:
        reader.stop_server()
        reader.shell.kill()
        reader.shell.communicate()
    assert compared >= 20
