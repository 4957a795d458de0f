"""A worker of gunicorn is killed under the default lease, and its client retries."""

import sys
from contextlib import closing
from http.client import HTTPConnection, RemoteDisconnected

import pytest

from testproject.harness.processes import Daemon, answers, free_port
from tests.harness.world import Database, environment
from tests.harness.zygote import PATIENCE, ROOT, wait_until

pytestmark = pytest.mark.postgres

#: Whether the record is completed, or its claim is a second old and the server has noticed the end of its session.
CAN_BE_RETRIED = """
SELECT count(*) FROM idempotency_record WHERE idempotency_key = %s AND (
    status = 'completed' OR (
        lease_expires_at < now() + interval '59 seconds' AND NOT EXISTS (SELECT FROM pg_stat_get_activity(session))
    )
)
"""


@pytest.mark.parametrize(("point", "attempt"), [("complete.before", 2), ("complete.committed", 1)])
def test_the_first_retry_a_second_after_a_kill_runs_or_replays(shared, tmp_path, point, attempt):
    key, port = f"gunicorn-{point}", free_port()
    options = f"--workers 2 --no-control-socket --bind 127.0.0.1:{port}"
    web = Daemon(
        "gunicorn",
        [sys.executable, "-W", "ignore", "-m", "gunicorn", "tests.crash.killed_worker", *options.split()],
        tmp_path,
        environment=environment(shared.url)
        | {"PYTHONPATH": str(ROOT), "KILL_AT": point, "KILLED": str(tmp_path / "killed")},
        is_ready=lambda: answers(("127.0.0.1", port)),
    )

    def post():
        with closing(HTTPConnection("127.0.0.1", port, timeout=PATIENCE)) as client:
            client.request("POST", "/transfer/", "{}", {"Idempotency-Key": key, "Content-Type": "application/json"})
            answer = client.getresponse()
            return answer.status, "Idempotency-Replayed" in answer.headers

    with web, closing(Database(shared.url)) as database:
        with pytest.raises((RemoteDisconnected, ConnectionResetError)):
            post()
        wait_until(lambda: database.count(CAN_BE_RETRIED, key), "the server notices the end of the session")
        assert post() == (201, attempt == 1)
        attempts = database.query("SELECT attempt FROM idempotency_record WHERE idempotency_key = %s", key)
        assert attempts == [(attempt,)]
        assert database.transfers(key) == {f"{key}-0": 1}
