"""The command line, its reports and exit codes, and its errors about a server that can't be judged."""

import http.server
import os
import re
import socket
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from contextlib import contextmanager
from dataclasses import replace
from html import unescape
from pathlib import Path

import pytest

import idempotency_key_conformance
from idempotency_key_conformance import __main__ as command
from idempotency_key_conformance import __version__, wire
from idempotency_key_conformance.judging import Trial, Verdict, judge
from idempotency_key_conformance.leaks import Leaks
from idempotency_key_conformance.preflight import UnjudgeableError, _index, prepare
from idempotency_key_conformance.profiles import ACP, IETF, PROFILES, STRIPE, Expected, Refusal, declare
from idempotency_key_conformance.suite import all_cases
from idempotency_key_conformance.wire import Answer, Connection, build, exchange_together

from .runs import BODY, in_thread, run, serving, target_at

#: Simulates a machine that has only Python.
BARE = """
import runpy, sys

class OnlyTheStandardLibrary:
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if top not in sys.stdlib_module_names and top != "idempotency_key_conformance":
            raise ModuleNotFoundError(f"{name} is not installed")

sys.meta_path.insert(0, OnlyTheStandardLibrary())
sys.argv[0] = "conformance"
runpy.run_module("idempotency_key_conformance", run_name="__main__")
"""


def arguments(target, *more):
    given = ["--url", target.url, "--profile", "stripe", "--body", BODY, "--header", "Authorization: alice"]
    return [*given, "--count-url", str(target.count_url), *more]


def test_the_command_runs_without_any_installed_package(tmp_path):
    with serving(tmp_path, "stripe") as target:
        done = subprocess.run(
            [sys.executable, "-S", "-c", BARE, *arguments(target, "--only", "sequential")],
            env={**os.environ, "PYTHONPATH": str(Path(idempotency_key_conformance.__file__).parents[1])},
            capture_output=True,
            text=True,
        )
    assert (done.returncode, done.stderr) == (0, "passed      sequential, 0 left\n")
    assert "checked 1: 1 passed, 0 deviates, 0 failed, 0 not judged" in done.stdout


def test_the_reports_have_the_findings(tmp_path, capsys):
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
    assert [suite.get(name) for name in ("tests", "failures", "skipped")] == ["4", "1", "2"]
    assert {case.get("name"): [child.tag for child in case] for case in suite.iter("testcase")} == {
        "sequential": ["system-out"],
        "replay-is-equal": ["failure"],
        "replay-is-marked": ["skipped"],
        "expiry": ["skipped"],
    }
    html = page.read_text()
    assert re.findall(r"<h2>([\w-]+)<", html) == ["replay-is-equal", "replay-is-marked", "expiry", "sequential"]
    assert ("width=device-width" in html, "src=" in html) == (True, False)


def test_each_report_names_its_command_and_declarations(tmp_path, capsys):
    junit, page = tmp_path / "report.xml", tmp_path / "report.html"
    with serving(tmp_path, "stripe") as target:
        more = ["--declare", "client-error=replayed", "--only", "sequential", "--other-account=Authorization: bob"]
        assert command.main(arguments(target, *more, "--junit", str(junit), "--html", str(page))) == 0
    properties = {each.get("name"): each.get("value") for each in ET.parse(junit).getroot().iter("property")}
    assert properties["declared"] == "client-error=replayed"
    assert properties["judged by"].startswith(f"idempotency-key-conformance {__version__}, Python 3.")
    assert "--header 'Authorization: …' --count-url" in properties["command"]
    assert "--other-account=Authorization: …" in properties["command"]
    text, html = capsys.readouterr().out, unescape(page.read_text())
    for value in properties.values():
        assert (value in text, value in html) == (True, True), value


def test_a_deviation_is_a_failure_of_a_strict_run(tmp_path, capsys):
    only = ["--profile", "acp", "--only", "replay-is-marked"]
    with serving(tmp_path, "acp", "unmarked") as target:
        assert command.main(arguments(target, *only)) == 0
        assert command.main(arguments(target, *only, "--strict")) == 1
    assert "1 failed" in capsys.readouterr().out


#: Errors of the first minute: the arguments that differ from a working run, and a part of the message.
UNJUDGEABLE = [
    (["--url", "http://127.0.0.1:1/charges"], "doesn't answer"),
    (["--body", '{"outcome": 402}'], "The operation answered 402"),
    (["--url", "http://127.0.0.1:port/"], "doesn't answer"),
    (["--count-url", "http://127.0.0.1:1/"], "can't be read"),
    (["--count-url", "http://127.0.0.1:port/"], "can't be read"),
    (["--count-command", "echo '"], "No closing quotation"),
    (["--count-url", "", "--count-command", "sh -c 'exit 3'"], "exit status 3"),
    (["--count-command", "echo none"], "shows no number"),
    (["--count-command", "echo 7"], "it showed 7, 7, 7."),
]


@pytest.mark.parametrize(("more", "sentence"), UNJUDGEABLE)
def test_a_server_that_can_not_be_judged_gets_a_one_line_message(more, sentence, tmp_path, capsys):
    junit = tmp_path / "report.xml"
    with serving(tmp_path, "stripe") as target:
        given = arguments(target, "--junit", str(junit), *more)
        if "--count-command" in more:
            given = [argument for argument in given if argument not in ("--count-url", target.count_url, "")]
        assert command.main(given) == 2
    printed = capsys.readouterr()
    assert (printed.out, printed.err.count("\n"), junit.exists()) == ("", 1, False)
    assert sentence in printed.err


def test_a_run_that_judges_nothing_is_a_failure(tmp_path, capsys):
    with serving(tmp_path, "stripe") as target:
        assert command.main(arguments(target, "--only", "restarted")) == 2
        assert "checked 0" in capsys.readouterr().out
        assert command.main(arguments(target, "--only", "no-such-case")) == 2


@pytest.mark.parametrize(
    "more", [["--declare", "nonsense=1"], ["--declare", "other-path=maybe"], ["--duplicates", "many"]]
)
def test_a_wrong_argument_is_a_usage_error(more, capsys):
    with pytest.raises(SystemExit, match="2"):
        command.main(arguments(target_at("http://127.0.0.1:1"), *more))
    assert "usage:" in capsys.readouterr().err


def test_a_server_may_declare_its_differences():
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


@pytest.mark.parametrize(
    ("sent", "seconds"), [("3", 3.0), ("Mon, 23 Nov 2026 10:00:00 GMT", 0.0), ("soon", None), ("", None)]
)
def test_retry_after_is_a_number_or_a_date(sent, seconds, monkeypatch):
    monkeypatch.setattr(wire.time, "time", lambda: 1e10)
    assert answer(429, "", Retry_After=sent).retry_after == seconds


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


def test_the_counter_is_found_among_other_numbers():
    assert _index([[2026, 11, 5], [2026, 11, 5], [2026, 11, 6], [2026, 11, 7]]) == 2
    assert _index([[5, 5], [5, 5], [6, 6], [7, 7]]) == 0
    with pytest.raises(UnjudgeableError, match="several numbers"):
        _index([[5, 8], [5, 8], [6, 9], [7, 10]])
    with pytest.raises(UnjudgeableError, match=r"showed \[5, 1\], \[7, 1\], \[9, 1\]"):
        _index([[5, 1], [5, 1], [7, 1], [9, 1]])


@pytest.mark.parametrize(("fault", "code"), [("", 0), ("ignores-keys", 1)])
def test_without_a_counter_results_are_counted(fault, code, tmp_path, capsys):
    with serving(tmp_path, "stripe", fault) as target:
        given = [
            each for each in arguments(target, "--only", "sequential") if each not in ("--count-url", target.count_url)
        ]
        assert command.main(given) == code
    assert "no counter: results are compared by their bodies" in capsys.readouterr().out


def test_without_a_counter_equal_answers_can_not_be_judged(capsys):
    with canned(200) as target:
        assert command.main(["--url", target.url, "--profile", "stripe", "--body", BODY]) == 2
    assert "must have a different answer" in capsys.readouterr().err


def test_a_header_replaces_the_default(tmp_path, monkeypatch, capsys):
    sent = []
    monkeypatch.setattr(
        command, "prepare", lambda target, profile: sent.append(target.fields) or prepare(target, profile)
    )
    with serving(tmp_path, "stripe") as target:
        command.main(arguments(target, "--header", "content-type: application/x", "--only", "sequential"))
        command.main(arguments(target, "--only", "sequential"))
    assert sent == [
        ("Authorization: alice", "content-type: application/x"),
        ("Content-Type: application/json", "Authorization: alice"),
    ]


def test_keys_without_quotes_have_other_forms():
    names = [
        [form.name for form in profile.keys] for profile in (declare(IETF, "quoted=no"), declare(ACP, "quoted=yes"))
    ]
    assert ("unterminated" in names[0], "unterminated" in names[1]) == (False, True)
    assert {form.name: form.is_valid for form in declare(IETF, "quoted=no").keys}["bare"] is True
    assert declare(STRIPE, "quoted=no").keys is STRIPE.keys


@pytest.mark.parametrize("profile", PROFILES.values())
def test_each_rule_cites_its_source(profile):
    cases = all_cases(Trial(target_at(""), profile))
    rules = [profile.rules.get(case.name, case.rule) for case in cases]
    known = ("draft section", "ACP 2026", "https://docs.stripe.com/", "this suite's promise")
    assert [rule.source for rule in rules if not rule.source.startswith(known)] == []
    assert set(profile.rules) <= {case.name for case in cases}


#: A result, an answer to another request, and the part of the result that it shows.
LEAKS = [
    ('{"id": 17}', '{"error": {"id": 17}}', "id (17)"),
    ('{"id": 17}', '{"error": {"status": 17}}', None),
    ('{"id": "3f0c77aa"}', '{"detail": "see 3f0c77aa"}', "id (3f0c77aa)"),
    ('{"id": 17}', '{"original": "{\\"id\\": 17}"}', "id (17)"),
    ('{"items": [{"id": 17}]}', '[{"id": 17}]', "id (17)"),
    # No leaks: values that the sender knows, times, booleans, and values that all results share.
    ('{"label": "sent-label", "amount": 5}', '{"label": "sent-label", "amount": 5}', None),
    ('{"at": "2026-11-26T18:00"}', '{"at": "2026-11-26T18:00"}', None),
    (f'{{"at": {int(time.time())}, "live": true, "none": null}}', f'{{"at": {int(time.time())}, "live": true}}', None),
    ('{"state": "succeeded"}', '{"state": "succeeded"}', None),
    ("created: 3f0c77aa", "you had created: 3f0c77aa", "the body (created: 3f0c77aa)"),
]


# Numbered, because a time in an id would differ between the processes of pytest-xdist.
@pytest.mark.parametrize(("result", "refusal", "shown"), LEAKS, ids=[str(number) for number in range(len(LEAKS))])
def test_a_part_of_a_result_in_a_refusal_is_detected(result, refusal, shown):
    leaks = Leaks()
    for _ in range(2):
        leaks.learn(answer(201, '{"state": "succeeded"}'))
    request = build("POST", "http://x/", (), b'{"label": "sent-label", "amount": 5}')
    assert leaks.shown(answer(201, result), answer(422, refusal), request) == shown


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

    do_PUT = do_POST  # noqa: N815 - the base class looks for it

    def log_message(self, *args):
        pass


@contextmanager
def canned(status):
    """A server that answers with ``status``, and has no counter."""
    with in_thread(http.server.ThreadingHTTPServer(("127.0.0.1", 0), Canned)) as server:
        url = f"http://127.0.0.1:{server.server_port}/{status}"
        yield target_at("", url=url, other_url=url, count_url=None, timeout=5.0, patience=0.2)


#: The server's status, the profile, the case, changed options, the verdict, and a part of its detail.
STILL = {"count_command": "echo 7"}
CANNED = [
    (0, "stripe", "concurrent-2", {}, Verdict.FAILED, "2 of 2 requests got no answer"),
    (500, "stripe", "sequential", {}, Verdict.NOT_JUDGED, "the operation itself answered 500"),
    (200, "stripe", "sequential", STILL, Verdict.FAILED, "0 effects instead of 1; 1 requests got a success"),
    (409, "stripe", "in-progress", {}, Verdict.NOT_JUDGED, "neither of two duplicates"),
    (409, "ietf", "other-payload-in-flight", {}, Verdict.DEVIATES, "0 effects instead of 1"),
    (500, "ietf", "other-payload-in-flight", {}, Verdict.FAILED, "broke the server"),
    (409, "stripe", "half-closed", {}, Verdict.FAILED, "ended with 409"),
    (409, "stripe", "cut-after-the-end", STILL, Verdict.NOT_JUDGED, "the operation itself answered 409"),
    (200, "stripe", "cut-after-the-end", {}, Verdict.NOT_JUDGED, "shows only in a counter"),
    (200, "stripe", "late-effects", STILL, Verdict.NOT_JUDGED, "began without a count"),
    (200, "stripe", "remembered", {"ttl": 5}, Verdict.NOT_JUDGED, "the case expiry"),
    (200, "stripe", "expiry", {"ttl": 1e-9}, Verdict.NOT_JUDGED, "shorter than the operation"),
    (200, "stripe", "restarted", {"commands": {"kill": "true"}}, Verdict.NOT_JUDGED, "needs --restart"),
    (0, "stripe", "key: bare", {}, Verdict.FAILED, "to be accepted"),
    (0, "stripe", "key: 256", {}, Verdict.PASSED, "refused"),
    (402, "stripe", "similar-keys: case", {}, Verdict.NOT_JUDGED, "refuses such a key"),
    (402, "stripe", "server-error", {}, Verdict.NOT_JUDGED, "was answered with 402"),
    # An error that looks like its replay; and one with the status of a running duplicate.
    (402, "ietf", "client-error", {}, Verdict.NOT_JUDGED, "two executions have the same answer"),
    (409, "ietf", "client-error", {}, Verdict.NOT_JUDGED, "two executions have the same answer"),
    (500, "acp", "server-error", {}, Verdict.NOT_JUDGED, "two executions have the same answer"),
    (503, "stripe", "unavailable", {}, Verdict.PASSED, "the profile doesn't specify"),
    (200, "stripe", "no-credentials", {"other_account": None, "fields": ()}, Verdict.NOT_JUDGED, "no credentials"),
    (501, "stripe", "other-method", {}, Verdict.NOT_JUDGED, "the operation itself answered 501"),
    (200, "stripe", "half-closed", {"url": "https://SERVER"}, Verdict.NOT_JUDGED, "in one direction"),
    (200, "stripe", "in-pieces", {"url": "https://SERVER"}, Verdict.NOT_JUDGED, "connection failed"),
    (200, "stripe", "replay-is-equal", {"url": "http://127.0.0.1:1"}, Verdict.NOT_JUDGED, "doesn't answer"),
    (200, "stripe", "other-payload", {"other_body": None}, Verdict.NOT_JUDGED, "needs --other-body"),
    (200, "acp", "reordered", {"body": '{"a": 1}'}, Verdict.NOT_JUDGED, "two members or more"),
    (200, "acp", "reordered", {"body": "a=1"}, Verdict.NOT_JUDGED, "two members or more"),
    (402, "stripe", "other-path", {"other_url": "http://SERVER"}, Verdict.NOT_JUDGED, "doesn't take --body"),
    (200, "stripe", "sequential", {"count_command": "sh -c 'exit 3'"}, Verdict.NOT_JUDGED, "exit status 3"),
    (200, "stripe", "sequential", {"count_command": "echo 7", "count_index": 1}, Verdict.NOT_JUDGED, "only 1 numbers"),
]


@pytest.mark.parametrize(("status", "profile", "case", "options", "verdict", "detail"), CANNED)
def test_a_case_that_can_not_be_judged_names_the_reason(status, profile, case, options, verdict, detail):
    with canned(status) as target:
        place = target.url.partition("//")[2]
        filled = {
            name: value.replace("SERVER", place) for name, value in options.items() if name in ("url", "other_url")
        }
        target = replace(target, **{**options, **filled})
        result = next(iter(run(target, profile, case, "errors=any", start=Trial).values()))
    assert (result.verdict, detail in result.detail) == (verdict, True), result


@pytest.mark.parametrize(
    ("answered", "case", "detail"),
    [
        (True, "concurrent-2", "too fast"),
        (True, "late-duplicates", "too fast"),
        (True, "in-progress", "too fast"),
        (True, "other-payload-in-flight", "too fast"),
        (True, "other-account-in-flight", "too fast"),
        (False, "retry-after", "duplicates wait for the result"),
    ],
)
def test_duplicates_and_strikes_must_meet_a_running_request(answered, case, detail, monkeypatch):
    monkeypatch.setattr(Connection, "is_answered", lambda self, within=0: answered)
    with canned(200) as target:
        target = replace(target, other_account="Authorization: bob")
        result = run(target, "stripe", case, start=Trial)[case]
    assert (result.verdict, detail in result.detail) == (Verdict.NOT_JUDGED, True), result


#: The command ``true`` strikes nothing. The results of the judge's checks for an answer, before and after the strike.
MISSED = [
    ("killed-while-it-runs", [False] * 3, "before the kill struck"),
    ("killed-while-it-runs", [True] * 3, "before the kill struck"),
    ("killed-after-the-effect", [True] * 3, "before the kill struck"),
    ("cut-after-the-end", [True] * 3, "before the connection was cut"),
    ("restarted", [], "still answers after --kill"),
    ("frozen-while-it-runs", [False, True], "freeze came too late"),
    ("frozen-while-it-runs", [True], "before it could be struck"),
]


@pytest.mark.parametrize(("case", "answered", "detail"), MISSED)
def test_a_strike_that_misses_is_void(case, answered, detail, tmp_path, monkeypatch):
    found = iter(answered)

    def before(case, trial):
        monkeypatch.setattr(Connection, "is_answered", lambda self, within=0: next(found))

    with serving(tmp_path, "stripe") as target:
        target = replace(target, commands=dict.fromkeys(("kill", "restart", "freeze", "thaw"), "true"))
        result = run(target, "stripe", case, before=before)[case]
    assert (result.verdict, detail in result.detail) == (Verdict.NOT_JUDGED, True), result


def test_a_counter_that_breaks_leaves_late_effects_unjudged(tmp_path):
    once = f"sh -c 'test ! -e {tmp_path}/read && touch {tmp_path}/read && echo 7'"
    with canned(200) as target:
        trial = Trial(replace(target, count_command=once), STRIPE)
        trial.began_with = 7
        result = judge(all_cases(trial, ["replay-is-equal"])[0], trial)
    assert (result.verdict, trial.began_with) == (Verdict.NOT_JUDGED, None), result


def test_a_silent_server_is_abandoned_after_the_timeout():
    with socket.create_server(("127.0.0.1", 0)) as mute:
        request = build("POST", f"http://127.0.0.1:{mute.getsockname()[1]}", (), b"x")
        answers, overlapped = exchange_together([request] * 2, timeout=0.1)
    assert ([str(answer) for answer in answers], overlapped) == (["no answer within 0.1 s"] * 2, True)
