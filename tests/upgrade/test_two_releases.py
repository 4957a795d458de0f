"""The previous release alongside this one: processes of both, each with a copy of the package, on one database.

The previous release is the newest tag, or the one before it if this is the tagged commit. Until there is a second
release, it is a copy of this one. Each of the two replays, takes over, recovers, sends and purges what the other one
has claimed, recorded or published.
"""

import json
import os
import shutil
import subprocess
import tarfile
from contextlib import closing
from io import BytesIO
from pathlib import Path

import pytest

import idempotency
from tests.harness.world import Database, environment, own_database
from tests.harness.zygote import ROOT, Zygote

pytestmark = pytest.mark.postgres

FIRST = "0.1.0"


def tag_of_the_release_before():
    """The newest version's tag that is not on this commit; None if there is no repository or no such tag."""
    if not (ROOT / ".git").exists():
        return None  # an unpacked sdist
    listed = _git("tag", "--list", "v*", "--sort=-version:refname").decode().split()
    here = _git("tag", "--points-at", "HEAD").decode().split()
    return next((tag for tag in listed if tag not in here), None)


def _git(*arguments):
    return subprocess.run(["git", "-C", ROOT, *arguments], capture_output=True, check=True).stdout


@pytest.fixture(scope="module")
def releases(tmp_path_factory):
    """The folder of each release's copy of the package."""
    folder = tmp_path_factory.mktemp("releases")
    copies = {"before": folder / "before", "this": folder / "this"}
    shutil.copytree(ROOT / "idempotency", copies["this"] / "idempotency", ignore=shutil.ignore_patterns("__pycache__"))
    tag = tag_of_the_release_before()
    if tag:
        with tarfile.open(fileobj=BytesIO(_git("archive", tag, "idempotency"))) as archive:
            archive.extractall(copies["before"], filter="data")
    else:
        assert idempotency.__version__ == FIRST, "the tag of the previous release is missing: git fetch --tags"
        shutil.copytree(copies["this"], copies["before"])
    return copies


class Release:
    """Processes that serve the project with one release of the package."""

    def __init__(self, folder, database):
        paths = os.pathsep.join(map(str, (folder, ROOT)))
        variables = {"DJANGO_SETTINGS_MODULE": "tests.upgrade.project", "PYTHONPATH": paths}
        self._zygote = Zygote("tests.upgrade.serve", environment(database) | variables, directory=folder)
        assert Path(self.do("identify")["file"]).parent == folder / "idempotency"

    def start(self, job, **spec):
        return self._zygote.fork(job=job, **spec)

    def do(self, job, **spec):
        return done(self.start(job, **spec))

    def post(self, path, key, **options):
        return self.do("request", path=path, key=key, **options)

    def run(self, name, *arguments):
        return self.do("command", name=name, arguments=arguments)

    def close(self):
        self._zygote.close()


def done(process):
    """The report of a process, at its end."""
    report = process.expect("done")
    process.end()
    return report


class Pair:
    """Two releases on one database. ``writer`` acts first, and ``reader`` then acts on the same records."""

    def __init__(self, writer, reader, database):
        self.writer, self.reader, self.query = writer, reader, database.query

    def abandon(self, path, key, at="wrote"):
        """Let a process of the writer die while it serves a request, and let the lease end."""
        process = self.writer.start("request", path=path, key=key, at=at, act="die")
        assert process.hear() is None
        process.end()
        self.move_back("lease_expires_at", key)

    def hold(self, key):
        """Let the writer begin a charge, and hold it before its response."""
        process = self.writer.start("request", path="/charge/", key=key, at="wrote", act="hold")
        process.expect("held")
        return process

    def effects(self, effect):
        ((count,),) = self.query(f"SELECT count(*) FROM upgrade_effect WHERE effect = '{effect}'")
        return int(count)

    def status(self, key):
        rows = self.query(f"SELECT status FROM idempotency_record WHERE idempotency_key = '{key}'")
        return rows[0][0] if rows else None

    def move_back(self, column, key):
        """Move a time of the record into the past of the database's clock."""
        self.query(
            f"UPDATE idempotency_record SET {column} = now() - interval '1 hour' WHERE idempotency_key = '{key}'"
        )


@pytest.fixture(scope="module")
def serving(releases):
    """A database migrated by the previous release and then by this one, and both releases on it."""
    with own_database(os.environ["DATABASE_URL"]) as url:
        with closing(Database(url)) as connection:
            connection.query("CREATE TABLE upgrade_effect (effect text)")
        with closing(Release(releases["before"], url)) as before, closing(Release(releases["this"], url)) as this:
            for release in (before, this):
                assert release.run("migrate", "--verbosity", "0")["code"] == 0
            yield url, {"before": before, "this": this}


#: Two copies of one release don't need both directions.
DIRECTIONS = [("before", "this"), ("this", "before")][: 2 if tag_of_the_release_before() else 1]


@pytest.fixture(scope="module", params=DIRECTIONS, ids="-".join)
def pair(request, serving):
    url, releases = serving
    with closing(Database(url)) as connection:
        connection.query("TRUNCATE upgrade_effect, idempotency_record, idempotency_step, idempotency_outbox_message")
        yield Pair(*(releases[name] for name in request.param), connection)


def test_an_outcome_is_replayed_byte_for_byte(pair):
    first = pair.writer.post("/charge/", "replayed")
    again = pair.reader.post("/charge/", "replayed")
    assert (first["status"], first["replayed"], again) == (201, False, {**first, "replayed": True})
    other = pair.reader.post("/charge/", "replayed", amount=2)
    assert (other["status"], other["code"]) == (422, "idempotency_key_reused")
    assert pair.effects("charge replayed") == 1


def test_a_duplicate_of_a_running_request_is_refused(pair):
    running = pair.hold("running")
    duplicate = pair.reader.post("/charge/", "running")
    assert (duplicate["status"], duplicate["code"]) == (409, "idempotency_in_progress")
    running.go()
    first = done(running)
    assert first["status"] == 201
    assert pair.reader.post("/charge/", "running")["body"] == first["body"]
    assert pair.effects("charge running") == 1


def test_the_claim_of_a_process_that_died_is_taken_over(pair):
    pair.abandon("/charge/", "died")
    taken_over = pair.reader.post("/charge/", "died")
    assert (taken_over["status"], json.loads(taken_over["body"])["attempt"]) == (201, 2)
    assert pair.writer.post("/charge/", "died")["body"] == taken_over["body"]
    assert pair.effects("charge died") == 1


def test_an_owner_that_wakes_late_commits_nothing(pair):
    sleeping = pair.hold("late")
    pair.move_back("lease_expires_at", "late")
    winner = pair.reader.post("/charge/", "late")
    sleeping.go()
    late = done(sleeping)
    assert (winner["status"], late["replayed"], late["body"]) == (201, True, winner["body"])
    assert pair.effects("charge late") == 1


def test_an_abandoned_claim_is_parked_and_a_decision_holds(pair):
    pair.abandon("/park/", "parked")
    assert pair.reader.run("recover_idempotency")["code"] == 0
    assert pair.status("parked") == "parked"
    refused = pair.writer.post("/park/", "parked")
    assert (refused["status"], refused["code"]) == (409, "idempotency_outcome_unknown")
    pair.writer.do("not_executed", key="parked")
    assert pair.reader.post("/park/", "parked")["status"] == 201


def test_an_abandoned_claim_is_reconciled_with_the_same_derived_key(pair):
    pair.abandon("/ask/", "asked")
    assert pair.reader.run("recover_idempotency")["code"] == 0
    assert pair.status("asked") == "completed"
    one, other = (release.post("/ask/", "asked") for release in (pair.writer, pair.reader))
    assert (one["replayed"], other["replayed"], one["body"]) == (True, True, other["body"])
    assert pair.effects(f"derived {json.loads(one['body'])['derived']}") == pair.effects("ask asked") == 1


def test_a_stored_step_is_not_run_again(pair):
    pair.abandon("/steps/", "stepped", at="stepped")
    assert pair.reader.run("idempotency_stats")["code"] == 0
    first = pair.reader.post("/steps/", "stepped")
    assert first["status"] == 201
    assert pair.writer.post("/steps/", "stepped")["body"] == first["body"]


def test_a_published_message_is_sent_once(pair):
    assert pair.writer.post("/order/", "ordered")["status"] == 201
    relayed = pair.reader.run("relay_outbox")
    assert (relayed["code"], relayed["sent"]) == (0, [["orders.placed", '{"order": 71}']])
    assert pair.writer.run("relay_outbox")["sent"] == []


def test_due_records_are_purged_and_an_account_is_erased(pair):
    assert [pair.writer.post("/charge/", key)["status"] for key in ("due", "kept")] == [201, 201]
    pair.move_back("expires_at", "due")
    assert pair.reader.run("purge_idempotency")["code"] == 0
    assert (pair.status("due"), pair.status("kept")) == (None, "completed")
    assert pair.reader.run("erase_idempotency", "shop", "--reason", "asked")["code"] == 0
    assert pair.status("kept") is None
