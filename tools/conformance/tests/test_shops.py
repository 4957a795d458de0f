"""The suite names each wrong server by the right case, and raises no alarm about a right one."""

import io
from dataclasses import replace
from functools import partial
from uuid import uuid4

import pytest

from idempotency_key_conformance import cases, connections
from idempotency_key_conformance import target as target_module
from idempotency_key_conformance.__main__ import main
from idempotency_key_conformance.judging import Trial, Verdict
from idempotency_key_conformance.preflight import UnjudgeableError, prepare
from idempotency_key_conformance.profiles import IETF
from idempotency_key_conformance.reports import Report
from idempotency_key_conformance.target import HarmError, NotJudgedError, Operation, Target

from . import shops, stores
from .runs import BODY, after_measuring, in_thread, meeting, run, target_at
from .shops import ConflictsForever, Limited, Reply, Right, WantsALength, problem

WRONG, RIGHT = shops.WRONG + stores.WRONG, shops.RIGHT + stores.RIGHT
STRIKES = ("kill", "restart", "freeze", "thaw")


@pytest.fixture
def judged(monkeypatch):
    """Judges a server. Returns it after the run, and the results."""
    monkeypatch.setattr(cases, "LINGER", 0.3)
    return partial(_judged, monkeypatch)


def _judged(monkeypatch, shop, only=("",)):
    with in_thread(shop()) as server:
        meets = meeting(server.expect)

        def before(case, trial):
            vars(trial).pop("seconds_of_an_operation", None)  # which may have been replaced for the last case
            meets(case, trial)
            server.takes = 0.2 if case.name.startswith(("killed-", "frozen-")) else 0.0
            if case.name == "cut-after-the-end":
                after_measuring(trial, lambda: setattr(server, "cuts_next", True))

        patience = 15.0 if isinstance(server, Limited) else 1.5
        target = target_at(server.url, patience=patience, timeout=20.0, same_account="Authorization: alice-2")
        target = replace(target, method=getattr(server, "method", "POST"))
        if getattr(server, "is_struck", False):
            target = replace(target, commands={name: name for name in STRIKES})
            monkeypatch.setattr(Target, "strike", lambda self, name: getattr(server, name)())
        results = run(target, "ietf", only, *getattr(server, "declared", ()), before=before)

    return server, results


def findings(results):
    """The first case of each cause, in the order of the report."""
    facts = {"profile": IETF, "url": "", "declared": (), "counted": "", "command": ""}
    report = Report(results=[*results.values()], **facts)
    found = [(group[0].case.name, group[0].verdict.value, group[0].detail) for group in report.findings()]
    return [each for each in found if each[1] in ("failed", "deviates")]


@pytest.mark.parametrize("shop", WRONG, ids=[shop.__name__ for shop in WRONG])
def test_each_wrong_shop_is_named_first(shop, judged):
    _, results = judged(shop)
    found = findings(results)
    assert [each[:2] for each in found[:1]] == [(shop.named, shop.verdict)], found


@pytest.mark.parametrize("shop", RIGHT, ids=[shop.__name__ for shop in RIGHT])
def test_a_right_shop_raises_no_alarm(shop, judged):
    server, results = judged(shop)
    assert findings(results) == []
    passed = [name for name, result in results.items() if result.verdict is Verdict.PASSED]
    assert len(passed) > 35
    if isinstance(server, Limited):
        assert server.times_shed > 0


@pytest.mark.parametrize("shop", stores.ESCAPES, ids=[shop.__name__ for shop in stores.ESCAPES])
def test_what_can_not_be_judged_from_outside_is_known(shop, judged):
    _, results = judged(shop)
    assert (findings(results), bool(shop.escapes)) == ([], True)


class Scripted(Right):
    """Answers POST by the statuses of a list, with the given Retry-After, and GET likewise. 0: no answer."""

    def __init__(self, posts, gets=(), wait=None):
        super().__init__()
        self.posts, self.gets, self.wait = list(posts), list(gets), wait

    def reply(self, statuses):
        if not (status := statuses.pop(0) if statuses else 201):
            raise ConnectionResetError
        wait = {"Retry_After": self.wait} if self.wait else {}
        return problem(status, "as written", **wait) if status >= 400 else Reply(status, {"id": uuid4().hex})

    def answer(self, sent):
        return self.reply(self.posts)

    def count(self):
        reply = self.reply(self.gets)
        return reply if reply.status >= 400 else super().count()


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(target_module, "SHED_PAUSE", 0.0)


def operation_at(server, **options):
    return Operation(target_at(server.url, patience=0.0, timeout=5.0, **options), IETF)


#: The answers to a request and its controls by turns, and what the request ends with.
SHED = [
    ([429, 201], 201),
    ([429, 429, 503, 201, 201], 201),
    ([429] * 3 + [201, 429] * 3, HarmError),
    ([429] * 3 + [429], NotJudgedError),
    ([429] * 3 + [0], NotJudgedError),
]


@pytest.mark.parametrize(("statuses", "end"), SHED)
def test_a_shed_request_is_repeated_until_others_show_whose_limit_it_is(statuses, end, quick):
    with in_thread(Scripted(statuses)) as server:
        operation = Operation(target_at(server.url, patience=5.0, timeout=5.0), IETF)
        if isinstance(end, int):
            assert operation.send().status == end
        else:
            with pytest.raises(end):
                operation.send()
    assert operation.shed == 3 if len(statuses) > 2 else 1


@pytest.mark.parametrize(("statuses", "end"), [([429, 201, 201], 201), ([429, 201, 0, 201], 201), ([0], None)])
def test_retries_end_when_the_patience_does(statuses, end, quick):
    with in_thread(Scripted(statuses)) as server:
        last = operation_at(server).settle()
    assert (last and last.status) == end


def test_a_limited_counter_is_read_again_and_a_missing_one_is_reported(quick):
    with in_thread(Scripted([], [429, 200, 404])) as server:
        target = target_at(server.url)
        assert target.effects() == 0
        with pytest.raises(NotJudgedError, match="it answered 404"):
            target.effects()


def test_a_server_that_sheds_everything_can_not_be_judged(quick):
    with in_thread(Scripted([429] * 9)) as server, pytest.raises(UnjudgeableError, match="sheds requests"):
        prepare(target_at(server.url, count_url=None), IETF)


def test_results_are_compared_when_none_is_shed(quick):
    with in_thread(Scripted([201, 201, 429, 429])) as server:
        assert prepare(target_at(server.url, count_url=None), IETF).results_differ


def test_results_that_are_always_shed_are_not_compared(quick):
    with in_thread(Scripted([201, 201] + [429] * 6)) as server:
        target = target_at(server.url, count_url=None, patience=0.0)
        with pytest.raises(UnjudgeableError, match="must have a different answer"):
            prepare(target, IETF)


#: The answers to the requests of a case, the case, and its verdict and detail.
CASES = [
    ([201, 429] * 3, "in-progress", Verdict.NOT_JUDGED, "the server shed 1 of 2 requests"),
    ([201, 500], "other-account", Verdict.FAILED, "it was refused: 500"),
    ([201, 502, 201], "restarted", Verdict.DEVIATES, "the retry's body differs"),
]


@pytest.mark.parametrize(("statuses", "case", "verdict", "detail"), CASES)
def test_cases_of_scripted_answers(statuses, case, verdict, detail):
    with in_thread(Scripted(statuses)) as server:
        commands = {"kill": "true", "restart": "true"}
        target = target_at(server.url, count_url=None, patience=0.0, commands=commands)
        result = run(target, "ietf", case, start=Trial)[case]
    assert (result.verdict, detail in result.detail) == (verdict, True), result


def test_a_request_in_pieces_may_be_shed_at_its_head(monkeypatch):
    monkeypatch.setattr(connections, "EARLY", 0.5)
    with in_thread(Right()) as server:
        server.sheds_heads = 1
        result = run(target_at(server.url, count_url=None), "ietf", "in-pieces", start=Trial)["in-pieces"]
    assert (result.verdict, server.sheds_heads) == (Verdict.PASSED, 0), result


def test_the_first_operation_is_remembered_without_a_counter():
    with in_thread(Right()) as server:
        result = run(target_at(server.url, count_url=None), "ietf", "remembered")["remembered"]
    assert result.verdict is Verdict.PASSED


#: Options for which a variation or a refusal can't be judged.
MISSING = [
    ("another-instance: white space", {"body": "a=1"}, "is not JSON"),
    ("another-instance: white space", {"body": "{}"}, "no white space to vary"),
    ("another-instance: chunked", {}, "doesn't take a chunked body"),
    ("other-account-after-a-refusal", {"refused_body": BODY}, "--refused-body was answered with 201"),
]


@pytest.mark.parametrize(("case", "options", "detail"), MISSING)
def test_what_can_not_vary_is_not_judged(case, options, detail):
    with in_thread(WantsALength()) as server:
        result = run(target_at(server.url, **options), "ietf", case)[case]
    assert (result.verdict, detail in result.detail) == (Verdict.NOT_JUDGED, True), result


def test_an_account_without_a_refused_body_is_judged():
    with in_thread(Right()) as server:
        result = run(target_at(server.url, refused_body=None), "ietf", "other-account-after-a-refusal")
    assert [each.detail for each in result.values()] == ["2 effects"]


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(("stream", "line"), [(io.StringIO, "0 left\n"), (Terminal, "\r\033[K")])
def test_progress_is_a_line_for_each_case_and_one_line_on_a_terminal(stream, line, monkeypatch, capsys):
    written = stream()
    monkeypatch.setattr("sys.stderr", written)
    with in_thread(Limited()) as server:
        server.limit = 3
        url = ["--url", f"{server.url}/charges", "--count-url", f"{server.url}/count", "--profile", "ietf"]
        more = ["--header", "Authorization: alice", "--body", BODY, "--only", "sequential", "--only", "replay-is-e"]
        assert main([*url, *more]) == 0
    assert "passed      sequential, 1 left" in written.getvalue()
    assert written.getvalue().endswith(line)
    assert "requests, by a rate limit or an overloaded server" in capsys.readouterr().out


def test_a_report_has_one_line_for_each_cause(judged):
    _, results = judged(ConflictsForever)
    report = Report(results=[*results.values()], profile=IETF, url="", declared=(), counted="", command="")
    text, page = report.as_text(), report.as_html()
    line = next(line for line in text.splitlines() if line.startswith("failed "))
    assert line.split()[1] == "concurrent-2"
    assert "also: concurrent-20, late-duplicates, " in text
    assert "<p>Also: concurrent-20, late-duplicates, " in page
    assert "prefers-color-scheme: dark" in page
