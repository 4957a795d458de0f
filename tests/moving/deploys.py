"""A project that is deployed again and again, each time changed by the guide's blocks, and its servers."""

from __future__ import annotations

import base64
import http.client
import json
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from testproject.harness.processes import Daemon, answers, free_port
from tests.docs.pages import FENCED, section

PAGE = "how-to/move-from-another-package.md"
STEPS = ("Before", "Both", "Wait", "Only this one", "Clear up")
PROJECT = Path(__file__).parent / "project"
#: The module of each package.
MODULES = {
    "django-idempotency-key": "idempotency_key",
    "drf-idempotency": "drf_idempotency",
    "djangorestframework-idempotency-key": "rest_framework_idempotency_key",
}
#: In seconds. No test waits for so long.
LIMIT = 30

SET_UP = """
import django
from django.core.management import call_command
django.setup()
call_command("migrate", run_syncdb=True, verbosity=0)
from django.contrib.auth.models import User
for name in ("alice", "bob"):
    User.objects.create_user(name, password="password")
"""


@dataclass(frozen=True)
class Answer:
    status: int
    body: bytes
    replayed: bool


def steps_of(package: str) -> dict[str, list[tuple[str, str]]]:
    """The blocks of a package's section, each with its language, by the step that they belong to."""
    parts = re.split(rf"^\*\*({'|'.join(STEPS)})\b", section(PAGE, package), flags=re.MULTILINE)[1:]
    return {step: FENCED.findall(text) for step, text in zip(parts[::2], parts[1::2], strict=True)}


def patched(source: str, patch: str) -> str:
    """``source`` after a block of the language diff, whose unchanged and removed lines stand in it exactly once."""
    lines = patch.splitlines()
    old, new = ("".join(f"{line[1:]}\n" for line in lines if line[:1] in kept) for kept in (" -", " +"))
    assert source.count(old) == 1, f"not there, or not once:\n{old}"
    return source.replace(old, new)


class Server(Daemon):
    """One deploy."""

    def __init__(self, directory: Path, environment: dict[str, str]) -> None:
        self.port = free_port()
        super().__init__(
            "server",
            [sys.executable, str(directory / "manage.py"), "runserver", "--noreload", f"127.0.0.1:{self.port}"],
            directory,
            environment=environment,
            is_ready=lambda: answers(("127.0.0.1", self.port)),
        )

    def post(self, key: str | None, *, amount: int = 5, account: str | None = "alice") -> Answer:
        headers = {"Content-Type": "application/json"}
        if key:
            headers["Idempotency-Key"] = key
        if account:
            headers["Authorization"] = f"Basic {base64.b64encode(f'{account}:password'.encode()).decode()}"
        with closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=LIMIT)) as connection:
            connection.request("POST", "/charges", json.dumps({"amount": amount}), headers)
            response = connection.getresponse()
            return Answer(response.status, response.read(), response.headers["Idempotency-Replayed"] == "true")


class Project:
    """A project that begins with the old package's release, and follows the guide step by step."""

    def __init__(self, package: str, directory: Path) -> None:
        self.directory = directory
        self.steps = steps_of(package)
        self.shared = directory / "shared"
        self.shared.mkdir()
        self.uninstalled = directory / "uninstalled"
        self.uninstalled.mkdir()
        self.source = PROJECT
        self._servers: list[Server] = []
        self.environment = {
            "DJANGO_SETTINGS_MODULE": "shop.settings",
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(self.uninstalled),
            "SHARED": str(self.shared),
        }

    def deploy(self, step: str) -> Server:
        """Apply a step of the guide, and serve the project beside the deploys before."""
        self.apply(step)
        server = Server(self.source, self.environment)
        self._servers.append(server)
        server.start()
        return server

    def apply(self, step: str) -> None:
        """Apply a step of the guide to a copy of the project."""
        directory = self.directory / step
        shutil.copytree(self.source, directory, ignore=shutil.ignore_patterns("*.log", "__pycache__"))
        self.source = directory
        for language, block in self.steps[step]:
            if language == "sh":
                self._run(block)
            else:
                self._edit(language, block)
        if step == "Before":
            self._call([sys.executable, "-c", SET_UP])

    def _edit(self, language: str, block: str) -> None:
        heading, _, text = block.partition("\n")
        path = self.source / heading.removeprefix("# ")
        before = path.read_text() if path.exists() else ""
        path.write_text(patched(before, text) if language == "diff" else before + text)

    def _run(self, commands: str) -> None:
        for command in commands.splitlines():
            if command.startswith("pip uninstall "):
                self._uninstall(command.split()[-1])
            else:
                self._call(["bash", "-c", command])

    def _uninstall(self, package: str) -> None:
        """The other tests still need it, so the project gets a module in its place that can't be imported."""
        (self.uninstalled / f"{MODULES[package]}.py").write_text(f'raise ImportError("{package} was uninstalled")\n')

    def _call(self, command: list[str]) -> None:
        done = subprocess.run(
            command,
            cwd=self.source,
            env=os.environ | self.environment,
            capture_output=True,
            text=True,
            timeout=2 * LIMIT,
            check=False,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"

    @property
    def runs(self) -> int:
        """How often the handler ran, in all deploys together."""
        path = self.shared / "runs"
        return len(path.read_text().splitlines()) if path.exists() else 0

    @contextmanager
    def running(self, server: Server, key: str) -> Iterator[Future[Answer]]:
        """A request whose handler has begun, and goes on when the block ends. Later handlers aren't held."""
        path = self.shared / "gate"
        with socket.socket(socket.AF_UNIX) as gate, ThreadPoolExecutor(1) as sender:
            gate.bind(str(path))
            gate.listen()
            gate.settimeout(LIMIT)
            answer = sender.submit(server.post, key)
            handler, _ = gate.accept()
            path.unlink()
            with handler:
                yield answer

    def stop(self) -> None:
        for server in self._servers:
            server.stop()
