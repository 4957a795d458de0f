"""The command line, its reports and its exit codes; what it says of a server that can't be judged."""

import http.server
import socket
import subprocess
import sys
import xml.etree.ElementTree as ET
from contextlib import contextmanager
from dataclasses import replace

import pytest

from idempotency.conformance import __main__ as command
from idempotency.conformance.judging import Verdict
from idempotency.conformance.profiles import ACP, IETF, STRIPE, Expected, Refusal, declare
from idempotency.conformance.wire import Answer, Connection, build, exchange_together
from tests.conformance.test_suite import BODY, run, serving, target_at
from tests.harness.servers import in_thread

pytestmark = pytest.mark.once

#: As on a machine that has nothing but Python.
BARE = """
import runpy, sys

class OnlyTheStandardLibrary:
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if top not in sys.stdlib_module_names and top != "idempotency":
            raise ModuleNotFoundError(f"{name} is not installed")

sys.meta_path.insert(0, OnlyTheStandardLibrary())
sys.argv[0] = "conformance"
runpy.run_module("idempotency.conformance", run_name="__main__")
"""


def arguments(target, *more):
    return ["--url", target.url, "--profile", "stripe", "--body", BODY, "--count-url", str(target.count_url), *more]


def test_it_runs_where_nothing_is_installed(tmp_path):
    with serving(tmp_path, "stripe") as target:
        done = subprocess.run(
            [sys.executable, "-S", "-c", BARE, *arguments(target, "--only", "sequential")],
            capture_output=True,
            text=True,
        )
    assert (done.returncode, done.stderr) == (0, "")
    assert "checked 1: 1 passed, 0 deviates, 0 failed, 0 not judged" in done.stdout


def test_the_reports_say_what_was_seen(tmp_path, capsys):
    junit, page = tmp_path / "report.xml", tmp_path / "report.html"
    with serving(tmp_path, "acp", "unmarked", "changes-body") as target:
        only = [argument for name in ("sequential", "replay", "expiry") for argument in ("--only", name)]
        files = ["--junit", str(junit), "--html", str(page), "--duplicates", "2,3"]
        code = command.main([*arguments(target, *only, *files), "--profile", "acp"])
    assert code == 1
    text = capsys.readouterr().out
    assert "failed      replay-is-equal" in text
    assert "SHOULD: ACP 2026-04-17, agentic checkout, section 6.3" in text
    assert text.endswith("checked 3: 1 passed, 1 deviates, 1 failed, 1 not judged\n")
    suite = ET.parse(junit).getroot()
    assert [suite.get(name) for name in ("tests", "failures", "skipped")] == ["4", "1", "1"]
    assert {case.get("name"): [child.tag for child in case] for case in suite} == {
        "sequential": ["system-out"],
        "replay-is-equal": ["failure"],
        "replay-is-marked": ["system-out"],
        "expiry": ["skipped"],
    }
    html = page.read_text()
    assert "<td class='failed'>failed</td>" in html
    assert "1 passed, 1 deviates, 1 failed, 1 not judged" in html
    assert "src=" not in html


def test_a_run_that_judges_nothing_is_a_failure(capsys):
    nowhere = target_at("http://127.0.0.1:1")
    assert command.main(arguments(nowhere, "--only", "sequential")) == 2
    assert "checked 0" in capsys.readouterr().out
    assert command.main(arguments(nowhere, "--only", "no-such-case")) == 2


@pytest.mark.parametrize(
    "more", [["--declare", "nonsense=1"], ["--declare", "other-path=maybe"], ["--duplicates", "many"]]
)
def test_a_wrong_argument_is_a_usage_error(more, capsys):
    with pytest.raises(SystemExit, match="2"):
        command.main(arguments(target_at("http://127.0.0.1:1"), *more))
    assert "usage:" in capsys.readouterr().err


def test_a_server_may_declare_what_it_does_otherwise():
    assert declare(IETF, "header=X-Key").header == "X-Key"
    assert declare(IETF, "marker=Replayed").marker == ("Replayed", "true")
    assert declare(IETF, "quoted=no").quoted is False
    assert declare(IETF, "missing=none").missing is None
    assert declare(IETF, "in-progress=425").in_progress == Refusal(425)
    assert declare(IETF, "other-path=fresh").other_path is Expected.FRESH
    refusal = Answer(409, (), b"no")
    assert IETF.complaint(refusal, Refusal(409))
    assert declare(IETF, "errors=any").complaint(refusal, Refusal(409)) is None


def answer(status, body, **fields):
    return Answer(
        status, tuple((name.lower().replace("_", "-"), value) for name, value in fields.items()), body.encode()
    )


PROBLEM = {"Content_Type": "application/problem+json; charset=utf-8"}


@pytest.mark.parametrize(
    ("profile", "given", "complaint"),
    [
        (IETF, answer(409, "", Link='<https://example.com>; rel="describedby"'), None),
        (IETF, answer(409, '{"title": "x", "code": "c"}', **PROBLEM), None),
        (IETF, answer(409, "[]", **PROBLEM), "no title"),
        (IETF, answer(409, '{"title": "x", "status": 400}', **PROBLEM), "status"),
        (IETF, answer(409, '{"title": "x"}', **PROBLEM), "code is None"),
        (STRIPE, answer(409, '{"error": {"type": "c", "message": ""}}'), None),
        (STRIPE, answer(409, '{"error": {"type": "x", "message": ""}}'), "neither"),
        (ACP, answer(409, '{"type": "invalid_request", "message": "", "code": "d"}'), "code is 'd'"),
        (ACP, answer(409, '{"type": "invalid_request", "message": "", "code": "c"}'), None),
    ],
)
def test_the_form_of_a_refusal_is_judged(profile, given, complaint):
    found = profile.complaint(given, Refusal(409, "c"))
    assert found is None if complaint is None else complaint in found


class Canned(http.server.BaseHTTPRequestHandler):
    """Answers each POST with the status that its path names, or not at all."""

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        status = int(self.path.rpartition("/")[2])
        if status:
            self.send_response(status)
            self.send_header("Content-Length", "0")
            if status == 202:
                self.send_header("Retry-After", "Mon, 23 Nov 2026 10:00:00 GMT")
            self.end_headers()

    def log_message(self, *args):
        pass


@contextmanager
def canned(status):
    """A server that answers so, beside a counter that stands at 7."""
    with in_thread(http.server.ThreadingHTTPServer(("127.0.0.1", 0), Canned)) as server:
        url, counter = f"http://127.0.0.1:{server.server_port}/{status}", f"{sys.executable} -S -c print(7)"
        yield target_at("", url=url, other_url=url, count_url=None, count_command=counter, timeout=5.0, patience=0.2)


#: What the server answers, the profile, the case, options that differ, the verdict, and what it says.
CANNED = [
    (0, "stripe", "concurrent-2", {}, Verdict.FAILED, "2 of 2 requests got no answer"),
    (500, "stripe", "sequential", {}, Verdict.NOT_JUDGED, "the operation itself answered 500"),
    (200, "stripe", "sequential", {}, Verdict.FAILED, "0 effects instead of 1"),
    (409, "stripe", "in-progress", {}, Verdict.NOT_JUDGED, "neither of two duplicates"),
    (409, "stripe", "other-payload-in-flight", {}, Verdict.FAILED, "0 effects"),
    (409, "stripe", "cut-after-the-end", {}, Verdict.FAILED, "ended with 409"),
    (202, "stripe", "cut-after-the-end", {}, Verdict.FAILED, "0 effects"),
    (0, "stripe", "cut-after-the-end", {}, Verdict.FAILED, "ended with no answer"),
    (0, "stripe", "key: bare", {}, Verdict.FAILED, "to be accepted"),
    (0, "stripe", "key: 256", {}, Verdict.PASSED, "refused"),
    (402, "stripe", "server-error", {}, Verdict.NOT_JUDGED, "was answered with 402"),
    # An error that looks like its replay.
    (402, "ietf", "client-error", {}, Verdict.NOT_JUDGED, "without a marker"),
    (500, "acp", "server-error", {}, Verdict.NOT_JUDGED, "looks like a replay"),
    (200, "stripe", "half-closed", {"url": "https://SERVER"}, Verdict.NOT_JUDGED, "in one direction"),
    (200, "stripe", "cut-after-the-end", {"url": "https://SERVER"}, Verdict.NOT_JUDGED, "connection failed"),
    (200, "stripe", "replay-is-equal", {"url": "http://127.0.0.1:1"}, Verdict.NOT_JUDGED, "doesn't answer"),
    (200, "stripe", "other-payload", {"other_body": None}, Verdict.NOT_JUDGED, "needs --other-body"),
    (200, "acp", "reordered", {"body": '{"a": 1}'}, Verdict.NOT_JUDGED, "fewer than two members"),
    (200, "stripe", "sequential", {"count_command": None}, Verdict.NOT_JUDGED, "without --count-url or"),
    (200, "stripe", "sequential", {"count_command": "sh -c 'exit 3'"}, Verdict.NOT_JUDGED, "exit status 3"),
    (200, "stripe", "sequential", {"count_command": "echo none"}, Verdict.NOT_JUDGED, "shows no number"),
]


@pytest.mark.parametrize(("status", "profile", "case", "options", "verdict", "detail"), CANNED)
def test_what_can_not_be_judged_says_why(status, profile, case, options, verdict, detail):
    with canned(status) as target:
        place = target.url.partition("//")[2]
        target = replace(target, **{name: value and value.replace("SERVER", place) for name, value in options.items()})
        result = next(iter(run(target, profile, case, "errors=any").values()))
    assert (result.verdict, detail in result.detail) == (verdict, True), result


@pytest.mark.parametrize(
    ("answered", "case", "detail"),
    [
        (True, "concurrent-2", "too fast"),
        (True, "in-progress", "too fast"),
        (True, "other-payload-in-flight", "too fast"),
        (True, "killed-while-it-runs", "before it could be struck"),
        (False, "retry-after", "duplicates wait for the result"),
    ],
)
def test_duplicates_and_strikes_must_meet_a_running_request(answered, case, detail, monkeypatch):
    monkeypatch.setattr(Connection, "is_answered", lambda self, within=0: answered)
    with canned(200) as target:
        result = run(target, "stripe", case)[case]
    assert (result.verdict, detail in result.detail) == (Verdict.NOT_JUDGED, True), result


@pytest.mark.parametrize("strike", ["kill", "freeze"])
def test_a_strike_that_misses_is_void(strike, tmp_path):
    case = {"kill": "killed-while-it-runs", "freeze": "frozen-while-it-runs"}[strike]
    with serving(tmp_path, "stripe", takes=0.5) as target:
        target = replace(target, commands=dict.fromkeys(("kill", "restart", "freeze", "thaw"), "true"))
        result = run(target, "stripe", case)[case]
    assert (result.verdict, f"{strike} came too late" in result.detail) == (Verdict.NOT_JUDGED, True), result


def test_a_server_that_says_nothing_is_given_up():
    with socket.create_server(("127.0.0.1", 0)) as mute:
        request = build("POST", f"http://127.0.0.1:{mute.getsockname()[1]}", (), b"x")
        answers, overlapped = exchange_together([request] * 2, timeout=0.1)
    assert ([str(answer) for answer in answers], overlapped) == (["no answer within 0.1 s"] * 2, True)
