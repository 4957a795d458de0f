"""The script that installs RabbitMQ, and runs a node by hand. Only where RabbitMQ is."""

from __future__ import annotations

import os
import socket
import subprocess
from contextlib import ExitStack
from pathlib import Path

import pytest
from kombu import Connection

SCRIPT = Path(__file__).with_name("rabbitmq.sh")


def three_free_ports() -> int:
    """The first of three that follow each other, below those that the system gives to outgoing connections."""
    for port in range(20_000, 30_000, 3):
        with ExitStack() as held:
            try:
                for number in range(port, port + 3):
                    held.enter_context(socket.create_server(("127.0.0.1", number)))
            except OSError:
                continue
            return port
    raise AssertionError("no ports are free")


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [SCRIPT, *arguments], env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )


def test_a_node_is_started_on_the_loopback_and_stopped_without_a_trace(tmp_path: Path) -> None:
    directory = str(tmp_path / "node")
    port = str(three_free_ports())
    try:
        started = run("start", directory, RABBITMQ_PORT=port)
        assert started.returncode == 0, started.stderr
        url = started.stdout.strip()
        assert url == f"amqp://guest:guest@127.0.0.1:{port}//"
        with Connection(url) as connection:
            assert connection.ensure_connection(max_retries=1).connected
        assert run("start", directory, RABBITMQ_PORT=port).returncode == 1
    finally:
        stopped = run("stop", directory)

    assert stopped.returncode == 0, stopped.stderr
    assert not Path(directory).exists()
    with Connection(url) as connection, pytest.raises(ConnectionRefusedError):
        connection.connect()


def test_what_is_installed_is_not_installed_again() -> None:
    assert run("check").returncode == 0
    assert run("install").stdout == ""


def test_without_an_order_it_says_what_it_can_do() -> None:
    said = run()

    assert said.returncode == 2
    assert "rabbitmq.sh install" in said.stderr
