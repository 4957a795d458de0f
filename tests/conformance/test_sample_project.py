"""This package conforms to the profiles that it offers, behind gunicorn and on a real database."""

import os
import re
import subprocess
import sys
from contextlib import contextmanager
from typing import NamedTuple
from urllib.request import urlopen

import pytest
from django.db import connection

from idempotency_key_conformance.judging import Verdict
from idempotency_key_conformance.profiles import PROFILES
from testproject.harness.processes import Daemon, answers, free_port
from tests.harness.world import own_database
from tests.harness.zygote import ROOT
from tools.conformance.tests.runs import STRUCK, UNSPECIFIED, meeting, run, target_at

#: The documented differences of the server from the profile.
DECLARED = {
    "ietf": ("marker=Idempotency-Replayed", "server-error=fresh"),
    "stripe": ("missing=400", "server-error=fresh"),
    "acp": ("other-path=refused",),
}
#: Deviations that the documentation explains.
DEVIATES = {"ietf": {"key: bare"}, "stripe": set(), "acp": set()}
#: Cases that need an option, or that don't apply: the sample project never answers 429 or 503, and keys have at most
#: 255 characters of visible ASCII.
NOT_JUDGED = {
    "another-instance: chunked",  # WSGI doesn't specify how to read it
    "another-credential",
    "other-method: GET",  # it lists the charges
    "one-connection",  # the server below closes each
    "throttled",
    "unavailable",
    "similar-keys: blanks",
    "similar-keys: a blank at the end",
}
NOT_JUDGED |= STRUCK | {"similar-keys: character 300"}


class Prepared(NamedTuple):
    """A database with the sample project's tables, and the header that each of the demo's users sends."""

    url: str
    tokens: dict[str, str]


def environment(url, profile):
    settings = {"DJANGO_SETTINGS_MODULE": "tests.conformance.settings", "CONFORMANCE_PROFILE": profile}
    return {**os.environ, **settings, "DATABASE_URL": url, "LOG_LEVEL": "CRITICAL"}


@pytest.fixture(scope="module")
def prepared():
    with own_database(os.environ["DATABASE_URL"]) as url:
        script = (
            "import django; django.setup(); from django.core.management import call_command as call; "
            "call('migrate', verbosity=0); call('create_demo_users')"
        )
        command = [sys.executable, "-W", "ignore", "-c", script]
        printed = subprocess.check_output(command, cwd=ROOT, env=environment(url, "ietf"), text=True)
        yield Prepared(url, dict(re.findall(r"(\w+): (Authorization: Token \w+)", printed)))


@contextmanager
def serving(profile, prepared, directory):
    """:returns: the address."""
    port = free_port()
    server = [sys.executable, "-m", "gunicorn", "testproject.wsgi", "--chdir", str(ROOT), "--bind", f"127.0.0.1:{port}"]
    server += ["--worker-class", "gthread", "--threads", "24", "--keep-alive", "0", "--no-control-socket"]
    ready = lambda: answers(("127.0.0.1", port), b"GET /health/ HTTP/1.0\r\n\r\n", b"HTTP/1.")  # noqa: E731
    with Daemon("gunicorn", server, directory, environment=environment(prepared.url, profile), is_ready=ready):
        yield f"http://127.0.0.1:{port}"


@pytest.mark.parametrize("profile", sorted(PROFILES))
def test_the_sample_project_conforms_to_the_profile(profile, prepared, tmp_path):
    body = '{"amount": %s, "currency": "usd", "label": "%s", "source": "%s"}'
    with serving(profile, prepared, tmp_path) as server:
        target = target_at(
            server,
            url=f"{server}/charges/",
            other_url=f"{server}/refunds/",
            count_url=f"{server}/count/",
            body=body % (100, "{unique}", "card"),
            other_body=body % (200, "{unique}", "card"),
            refused_body=body % (100, "", "declined"),
            crashing_body=body % (100, "broken", "card"),
            fields=("Content-Type: application/json", prepared.tokens["alice"]),
            other_account=prepared.tokens["bob"],
            same_account=None,
            throttled_body=None,
            unavailable_body=None,
            timeout=30.0,
        )
        before = meeting(lambda count: urlopen(f"{server}/expect/{count}/").close())
        results = run(target, profile, "", *DECLARED[profile], before=before)
    seen = {
        verdict: {name: result.detail for name, result in results.items() if result.verdict is verdict}
        for verdict in Verdict
    }
    assert not seen[Verdict.FAILED]
    assert set(seen[Verdict.DEVIATES]) == DEVIATES[profile], seen
    skipped = (NOT_JUDGED | UNSPECIFIED[profile]) & set(results)
    if "ietf" in profile:
        skipped -= {"replay-is-marked"}  # declared
    if connection.vendor == "sqlite":
        # A duplicate may wait for the lock of the first request's transaction, and then get its result.
        seen[Verdict.NOT_JUDGED].pop("retry-after", None)
    assert set(seen[Verdict.NOT_JUDGED]) == skipped, seen
