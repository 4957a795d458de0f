"""The release before beside this one: two processes, each with its own copy of the package, on one database.

The release before is the newest tag, or the one before it if this is the tagged commit. Until there is a second release
it is a copy of this one. What one of the two has claimed, recorded or published, the other replays, takes over,
recovers, sends and purges, in both directions.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest

import idempotency
from tests.harness.world import Database, own_database

pytestmark = [pytest.mark.postgres, pytest.mark.timeout(240)]

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
FIRST = "0.1.0"


def tag_of_the_release_before() -> str | None:
    """The newest tag of a version that is not that of this commit; None if there is no repository, or no such tag."""
    if not (ROOT / ".git").exists():
        return None  # an unpacked sdist
    listed = _git("tag", "--list", "v*", "--sort=-version:refname").decode().split()
    here = _git("tag", "--points-at", "HEAD").decode().split()
    return next((tag for tag in listed if tag not in here), None)


def _git(*arguments: str) -> bytes:
    return subprocess.run(["git", "-C", ROOT, *arguments], capture_output=True, check=True).stdout


@pytest.fixture(scope="module")
def releases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """For each of the two releases, the folder of its copy of the package."""
    folder = tmp_path_factory.mktemp("releases")
    copies = {"before": folder / "before", "this": folder / "this"}
    shutil.copytree(ROOT / "idempotency", copies["this"] / "idempotency", ignore=shutil.ignore_patterns("__pycache__"))
    tag = tag_of_the_release_before()
    if tag:
        with tarfile.open(fileobj=BytesIO(_git("archive", tag, "idempotency"))) as archive:
            archive.extractall(copies["before"], filter="data")
    else:
        assert idempotency.__version__ == FIRST, "there is a release before, and its tag is not here: git fetch --tags"
        shutil.copytree(copies["this"], copies["before"])
    return copies


class Release:
    """A process that serves the project with one release of the package."""

    def __init__(self, folder: Path, database: str) -> None:
        # Coverage is not measured, because the copy is no part of the source.
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE_")}
        self._process = subprocess.Popen(
            [sys.executable, HERE / "serve.py"],
            env={**inherited, "PYTHONPATH": str(folder), "DATABASE_URL": database},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        started = self.hear()
        assert Path(started["file"]).parent == folder / "idempotency"

    def hear(self) -> dict[str, Any]:
        assert self._process.stdout
        line = self._process.stdout.readline()
        assert line, "the process has ended"
        event: dict[str, Any] = json.loads(line)
        return event

    def tell(self, job: str, *arguments: Any, **options: Any) -> None:
        assert self._process.stdin
        self._process.stdin.write(json.dumps([job, arguments, options]) + "\n")
        self._process.stdin.flush()

    def post(self, path: str, key: str, **options: Any) -> dict[str, Any]:
        self.tell("request", path, key, **options)
        return self.hear()

    def run(self, name: str, *arguments: str) -> dict[str, Any]:
        self.tell("command", name, *arguments)
        return self.hear()

    def die(self, path: str, key: str, at: str) -> None:
        """End it without notice while it serves a request."""
        self.tell("request", path, key, at=at, act="die")
        assert self._process.wait(60) == 1

    def end(self) -> None:
        self._process.kill()
        self._process.communicate()


class Pair:
    """Two releases on one database. ``writer`` acts first, and ``reader`` meets what it left."""

    def __init__(self, folders: dict[str, Path], writer: str, reader: str, url: str, database: Database) -> None:
        self._folder = folders[writer]
        self._url = url
        self._database = database
        self.writer = Release(folders[writer], url)
        self.reader = Release(folders[reader], url)

    def end(self) -> None:
        self.writer.end()
        self.reader.end()

    @contextmanager
    def another_writer(self) -> Iterator[Release]:
        """One more process of the first release, which may die."""
        release = Release(self._folder, self._url)
        try:
            yield release
        finally:
            release.end()

    def effects(self, effect: str) -> int:
        ((count,),) = self._database.query(f"SELECT count(*) FROM upgrade_effect WHERE effect = '{effect}'")
        return int(count)

    def status(self, key: str) -> str | None:
        rows = self._database.query(f"SELECT status FROM idempotency_record WHERE idempotency_key = '{key}'")
        return rows[0][0] if rows else None

    def move_back(self, column: str, key: str) -> None:
        """Let a time of the record be over, as the database's clock sees it."""
        self._database.query(
            f"UPDATE idempotency_record SET {column} = now() - interval '1 hour' WHERE idempotency_key = '{key}'"
        )


@pytest.fixture(scope="module")
def database(releases: dict[str, Path]) -> Iterator[str]:
    """A database that the release before has migrated, and then this one."""
    with own_database(os.environ["DATABASE_URL"]) as url:
        with closing(Database(url)) as connection:
            connection.query("CREATE TABLE upgrade_effect (effect text)")
        for name in ("before", "this"):
            release = Release(releases[name], url)
            assert release.run("migrate", "--verbosity", "0")["code"] == 0
            release.end()
        yield url


@pytest.fixture(scope="module", params=[("before", "this"), ("this", "before")], ids=["upgrade", "back"])
def pair(request: pytest.FixtureRequest, releases: dict[str, Path], database: str) -> Iterator[Pair]:
    writer, reader = request.param
    with closing(Database(database)) as connection:
        connection.query("TRUNCATE upgrade_effect, idempotency_record, idempotency_step, idempotency_outbox_message")
        pair = Pair(releases, writer, reader, database, connection)
        try:
            yield pair
        finally:
            pair.end()


def test_an_outcome_is_replayed_byte_for_byte(pair: Pair) -> None:
    first = pair.writer.post("/charge/", "replayed")
    again = pair.reader.post("/charge/", "replayed")
    assert (first["status"], first["replayed"], again["replayed"]) == (201, False, True)
    assert (again["status"], again["body"]) == (first["status"], first["body"])
    other = pair.reader.post("/charge/", "replayed", amount=2)
    assert (other["status"], other["code"]) == (422, "idempotency_key_reused")
    assert pair.effects("charge replayed") == 1


def test_a_duplicate_of_a_running_request_is_refused(pair: Pair) -> None:
    pair.writer.tell("request", "/charge/", "running", at="wrote", act="hold")
    assert pair.writer.hear() == {"held": "wrote"}
    duplicate = pair.reader.post("/charge/", "running")
    assert (duplicate["status"], duplicate["code"]) == (409, "idempotency_in_progress")
    pair.writer.tell("go")
    first = pair.writer.hear()
    assert first["status"] == 201
    assert pair.reader.post("/charge/", "running")["body"] == first["body"]
    assert pair.effects("charge running") == 1


def test_the_claim_of_a_process_that_died_is_taken_over(pair: Pair) -> None:
    with pair.another_writer() as release:
        release.die("/charge/", "died", at="wrote")
    pair.move_back("lease_expires_at", "died")
    taken_over = pair.reader.post("/charge/", "died")
    assert (taken_over["status"], json.loads(taken_over["body"])["attempt"]) == (201, 2)
    assert pair.writer.post("/charge/", "died")["body"] == taken_over["body"]
    assert pair.effects("charge died") == 1


def test_an_owner_that_wakes_late_commits_nothing(pair: Pair) -> None:
    pair.writer.tell("request", "/charge/", "late", at="wrote", act="hold")
    assert pair.writer.hear() == {"held": "wrote"}
    pair.move_back("lease_expires_at", "late")
    winner = pair.reader.post("/charge/", "late")
    assert winner["status"] == 201
    pair.writer.tell("go")
    late = pair.writer.hear()
    assert (late["replayed"], late["body"]) == (True, winner["body"])
    assert pair.effects("charge late") == 1


def test_an_abandoned_claim_is_parked_and_a_decision_holds(pair: Pair) -> None:
    with pair.another_writer() as release:
        release.die("/park/", "parked", at="wrote")
    pair.move_back("lease_expires_at", "parked")
    assert pair.reader.run("recover_idempotency")["code"] == 0
    assert pair.status("parked") == "parked"
    refused = pair.writer.post("/park/", "parked")
    assert (refused["status"], refused["code"]) == (409, "idempotency_outcome_unknown")
    pair.writer.tell("not_executed", "parked")
    assert pair.writer.hear() == {}
    assert pair.reader.post("/park/", "parked")["status"] == 201


def test_an_abandoned_claim_is_reconciled_with_the_same_derived_key(pair: Pair) -> None:
    with pair.another_writer() as release:
        release.die("/ask/", "asked", at="wrote")
    pair.move_back("lease_expires_at", "asked")
    assert pair.reader.run("recover_idempotency")["code"] == 0
    assert pair.status("asked") == "completed"
    answers = [release.post("/ask/", "asked") for release in (pair.writer, pair.reader)]
    assert [answer["replayed"] for answer in answers] == [True, True]
    assert answers[0]["body"] == answers[1]["body"]
    assert pair.effects(f"derived {json.loads(answers[0]['body'])['derived']}") == pair.effects("ask asked") == 1


def test_a_stored_step_is_not_run_again(pair: Pair) -> None:
    with pair.another_writer() as release:
        release.die("/steps/", "stepped", at="stepped")
    pair.move_back("lease_expires_at", "stepped")
    assert pair.reader.run("idempotency_stats")["code"] == 0
    first = pair.reader.post("/steps/", "stepped")
    assert first["status"] == 201
    assert pair.writer.post("/steps/", "stepped")["body"] == first["body"]


def test_a_published_message_is_sent_once(pair: Pair) -> None:
    assert pair.writer.post("/order/", "ordered")["status"] == 201
    relayed = pair.reader.run("relay_outbox")
    assert (relayed["code"], relayed["sent"]) == (0, [["orders.placed", '{"order": 71}']])
    assert pair.writer.run("relay_outbox")["sent"] == []


def test_what_is_due_is_purged_and_an_account_is_erased(pair: Pair) -> None:
    for key in ("due", "kept"):
        assert pair.writer.post("/charge/", key)["status"] == 201
    pair.move_back("expires_at", "due")
    assert pair.reader.run("purge_idempotency")["code"] == 0
    assert (pair.status("due"), pair.status("kept")) == (None, "completed")
    assert pair.reader.run("erase_idempotency", "shop", "--reason", "asked")["code"] == 0
    assert pair.status("kept") is None
