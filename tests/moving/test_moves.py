"""Moving from another package: no retry runs twice, and clients see what the guide says."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import pytest

from testproject.harness.processes import short_directory
from tests.docs.pages import section, table
from tests.moving.deploys import MODULES, PAGE, Answer, Project, Server

pytestmark = [pytest.mark.once, pytest.mark.sqlite]

#: Sends requests, and returns what the last of them got.
Case = Callable[[Project, Server], "Seen"]


@pytest.fixture(params=MODULES)
def package(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    # `tox -e moving` has imported all three before, so that none can be left out there.
    pytest.importorskip(MODULES[name], reason=f"`tox -e moving` has {name}")
    return name


@pytest.fixture
def project(package: str) -> Iterator[Project]:
    with short_directory("moving-") as directory:
        project = Project(package, directory)
        try:
            yield project
        finally:
            project.stop()


def new_key() -> str:
    return str(uuid4())


def send_again(project: Project, servers: list[Server], key: str, body: bytes) -> list[Answer]:
    """Send a key to each server, none of which runs the handler, and all of which give the first body."""
    runs = project.runs
    answers = [server.post(key) for server in servers]
    assert [answer.body for answer in answers] == [body] * len(servers)
    assert project.runs == runs
    return answers


def send_first(project: Project, server: Server, *others: Server) -> tuple[str, bytes]:
    """A new key runs once, and is then known to this server and to the others."""
    key, runs = new_key(), project.runs
    answer = server.post(key)
    assert (answer.status, project.runs) == (201, runs + 1)
    send_again(project, [server, *others, server], key, answer.body)
    return key, answer.body


def send_at_once(project: Project, server: Server, other: Server) -> None:
    """A retry that reaches another deploy while the first request runs is refused, and gets its outcome afterwards."""
    key = new_key()
    with project.running(server, key) as first:
        assert other.post(key).status == 409
    send_again(project, [other, server, other], key, first.result().body)


def test_no_retry_runs_twice_whichever_deploy_it_began_in(project: Project, package: str) -> None:
    before = project.deploy("Before")
    unseen, seen = [send_first(project, before) for _ in range(2)]

    both = project.deploy("Both")
    send_again(project, [both], *seen)
    send_first(project, before, both)
    send_first(project, both, before)
    if package != "django-idempotency-key":  # it doesn't know what runs
        send_at_once(project, before, both)
        send_at_once(project, both, before)
    before.stop()
    send_at_once(project, both, both)
    known = [send_first(project, both)]

    only = project.deploy("Only this one")
    known += [send_first(project, both, only), send_first(project, only, both)]
    send_at_once(project, both, only)
    send_at_once(project, only, both)
    both.stop()
    for key, body in known:
        assert [answer.replayed for answer in send_again(project, [only], key, body)] == [True]
    runs = project.runs
    assert only.post(seen[0]).replayed == (package == "djangorestframework-idempotency-key")
    assert not only.post(unseen[0]).replayed, "then there is no need to wait"
    assert project.runs == runs + (1 if package == "djangorestframework-idempotency-key" else 2)
    only.stop()

    last = project.deploy("Clear up")
    for key, body in known:
        send_again(project, [last], key, body)


@dataclass(frozen=True)
class Seen:
    """What a client gets for its last request."""

    status: int
    #: Whether the handler ran for it.
    runs: bool
    #: Whether it is shown the first request's charge.
    first_charge: bool


def see(project: Project, send: Callable[[], Answer], first: Answer | None = None) -> Seen:
    runs = project.runs
    answer = send()
    charge = b'"id"' in answer.body
    return Seen(answer.status, project.runs > runs, charge and first is not None and answer.body == first.body)


def again(amount: int = 5, /, **other: Any) -> Case:
    """A key is sent, and sent again."""

    def case(project: Project, server: Server) -> Seen:
        key = new_key()
        first = server.post(key, amount=amount)
        return see(project, lambda: server.post(key, **{"amount": amount, **other}), first)

    return case


def while_it_runs(project: Project, server: Server) -> Seen:
    key = new_key()
    with project.running(server, key):
        return see(project, lambda: server.post(key))


#: What a client sends, in the guide's words.
CASES: dict[str, Case] = {
    "a key again, after 201": again(),
    "a key again, while the first request runs": while_it_runs,
    "a used key with another payload": again(5, amount=6),
    "the same key and payload as another account": again(account="bob"),
    "the same key and payload without credentials": again(account=None),
    "a key again, after 402": again(402),
    "a key again, after 500": again(500),
    "a key that is not a UUID": lambda project, server: see(project, lambda: server.post(f"order-{new_key()}")),
    "no key": lambda project, server: see(project, lambda: server.post(None)),
}


def test_clients_see_what_the_table_says(project: Project, package: str) -> None:
    text = section(PAGE, "What clients will see")
    columns = [*MODULES, "this package"]
    assert f"| what a client sends | {' | '.join(columns)} |" in text
    rows = {label: dict(zip(columns, cells, strict=True)) for label, *cells in table(text) if len(cells) == 4}
    assert set(rows) == set(CASES)

    def look(column: str, server: Server) -> None:
        seen = {label: case(project, server) for label, case in CASES.items()}
        server.stop()
        cells = {label: row[column] for label, row in rows.items()}
        assert seen == {
            label: Seen(int(cell[:3]), runs="runs" in cell, first_charge="first" in cell)
            for label, cell in cells.items()
        }

    look(package, project.deploy("Before"))
    for step in ("Both", "Only this one"):
        project.apply(step)
    look("this package", project.deploy("Clear up"))
