"""``python -m tests.conformance.compare [ROW …]``: judge packages that protect the same operation.

Each row is installed from its registry in the pinned version, into ``--directory``, and is started on the loopback
interface. It is judged by the profile closest to its documentation, with the differences that the latter declares.
"""

import argparse
import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import venv
import xml.etree.ElementTree as ET
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from testproject.harness.processes import answers, free_port, wait_until
from testproject.harness.redis import running_redis
from tests.results import note
from tools.reports import markdown, say

SERVERS = Path(__file__).with_name("servers")
ROOT = SERVERS.parents[2]
SUITE = ROOT / "tools/conformance/src"
DJANGO = ("Django==5.2.19", "djangorestframework==3.18.3", "gunicorn==27.0.1")
ASGI = ("fastapi==0.165.0", "uvicorn==0.54.0")
IN_SQLITE = (*ASGI, "aiosqlite==0.22.1", "sqlalchemy[asyncio]==2.1.9")
#: The stores that only one process at a time may use.
ALONE = {"memory", "file of one process"}


@dataclass(frozen=True)
class Row:
    package: str
    version: str
    #: Where records are kept: in one process's memory, or in storage that survives a crash.
    store: str
    requirements: tuple[str, ...]
    profile: str
    declared: tuple[str, ...] = ()

    @property
    def name(self):
        return f"{self.package} ({self.store})"


_UNMARKED = ("quoted=no", "errors=any", "missing=none")
_MARKED = (*_UNMARKED, "marker=Idempotent-Replayed")
_RELEASED = (*_UNMARKED, "marker=Idempotency-Replayed", "server-error=fresh")
_REQUIRED = ("quoted=no", "errors=any", "marker=X-Idempotent-Replayed")
_EXPRESS = (*_UNMARKED, "reused=417", "client-error=fresh")
_RECORDING = ("quoted=no", "errors=any", "throttled=replayed", "unavailable=replayed")
_FRESH = ("client-error=fresh", "server-error=fresh")
_SCOPED = ("quoted=no", "missing=none", "marker=Idempotency-Replayed", "in-progress=423", *_FRESH)
_REQUEST_ID = (*_UNMARKED, "header=X-Request-ID", "throttled=replayed", "unavailable=replayed")
ROWS = (
    Row("django-idempotency", "this checkout", "table", DJANGO, "ietf", ("marker=Idempotency-Replayed", "unknown=409")),
    Row("django-idempotency-key", "1.3.0", "memory", DJANGO, "ietf", ("quoted=no", "errors=any", "in-progress=423")),
    Row("django-idempotency-key", "1.3.0", "file", DJANGO, "ietf", ("quoted=no", "errors=any", "in-progress=423")),
    Row("drf-idempotency", "1.0.0", "table", DJANGO, "ietf", (*_UNMARKED, "server-error=fresh")),
    Row("djangorestframework-idempotency-key", "1.0.3", "table", DJANGO, "ietf", (*_UNMARKED, "reused=409")),
    Row("fastapi-idempotency", "0.1.1", "memory", ASGI, "ietf", _MARKED),
    # It imports its Redis backend even if another one is used.
    Row("asgi-idempotency-header", "0.2.0", "memory", (*ASGI, "redis==4.6.0"), "ietf", _MARKED),
    Row("idempot", "1.0.0", "memory", ASGI, "ietf", _UNMARKED),
    Row("fastapi-idempotency-key", "0.1.1", "memory", IN_SQLITE, "ietf", _RELEASED),
    Row("fastapi-idempotency-key", "0.1.1", "file", IN_SQLITE, "ietf", _RELEASED),
    Row("fastidempotent", "0.1.0", "memory", IN_SQLITE, "ietf", _REQUIRED),
    Row("fastidempotent", "0.1.0", "file of one process", IN_SQLITE, "ietf", _REQUIRED),
    Row("express-idempotency", "1.0.6", "memory", (), "ietf", _EXPRESS),
    Row("@node-idempotency/core", "1.0.11", "memory", (), "ietf", _RECORDING),
    # Without a scope, as in its first example.
    Row("idemkit", "1.0.2", "memory", (*ASGI, "idemkit[asgi,redis]==1.0.2"), "ietf", _SCOPED),
    Row("idemkit", "1.0.2", "Redis, by account", (*ASGI, "idemkit[asgi,redis]==1.0.2"), "ietf", _SCOPED),
    Row("drf-idem", "0.1.1", "Redis", (*DJANGO, "redis==6.4.0"), "ietf", _REQUEST_ID),
    # It protects requests of users only.
    Row("drf-idempotencykey", "0.2.0", "table", DJANGO, "ietf", (*_UNMARKED, "reused=409", *_FRESH)),
    # With one added line, which puts the account into the key.
    Row("express-idempotency", "1.0.6", "memory, by account", (), "ietf", _EXPRESS),
    Row("@node-idempotency/core", "1.0.11", "memory, by account", (), "ietf", _RECORDING),
)

#: The columns of the table, and the cases behind each.
COLUMNS = {
    "retry": ("sequential", "replay-is-equal"),
    "2 at once": ("concurrent-2",),
    "50": ("concurrent-50",),
    "200": ("concurrent-200",),
    "late": ("late-duplicates",),
    "other payload": ("other-payload", "other-payload-in-flight"),
    "other account": ("other-account", "no-credentials"),
    "other path": ("other-path", "other-method: PUT", "other-method: PATCH"),
    "client gone": ("cut-before-the-end", "cut-after-the-end", "half-closed", "in-pieces"),
    "restart": ("restarted",),
    "40 s": ("long-late-duplicates",),
    "killed": ("killed-early", "killed-while-it-runs", "killed-late", "killed-after-the-effect"),
}
#: Columns of cases whose names begin alike. One that isn't judged doesn't count.
PREFIXES = {
    "key syntax": ("missing-key", "key: ", "similar-keys: "),
    "refusals": ("in-progress", "retry-after"),
    "failures": ("client-error", "server-error", "throttled", "unavailable"),
}
#: Duplicates of a request whose handler outlasts every default lease here.
LONG = {"--only": "late-duplicates", "--body": '{"amount": 1, "order": "{unique}", "seconds": 40}', "--timeout": "90"}
#: The mark of each verdict, from the worst to the best.
MARKS = {"failed": "**no**", "deviates": "deviates", "not judged": "–", "passed": "yes"}


def install(row, directory):
    """:returns: the command of the server, without its port."""
    place = directory / f"{row.package.replace('/', '-')}-{row.version.replace(' ', '-')}"
    if not row.requirements:
        place.mkdir(parents=True, exist_ok=True)
        for name in ("package.json", "express_server.js"):
            shutil.copy(SERVERS / name, place)
        subprocess.run(["npm", "install", "--silent", "--no-audit", "--no-fund"], cwd=place, check=True)
        return ["node", str(place / "express_server.js")]
    python = str(place / "bin/python")
    if not Path(python).exists():
        venv.create(place, with_pip=True)
        own = str(ROOT) if row.version == "this checkout" else f"{row.package}=={row.version}"
        subprocess.run([python, "-m", "pip", "install", "-q", *row.requirements, own], check=True)
    workers = ["--workers", "1" if row.store in ALONE else "2"]
    if ASGI[1] in row.requirements:
        return [python, "-m", "uvicorn", "--no-access-log", *workers, "asgi_server:app", "--port"]
    server = [python, "-m", "gunicorn", "--no-control-socket", "--keep-alive", "0", "--worker-class", "gthread"]
    return [*server, "--threads", "100", *workers, "django_server", "--bind"]


def arguments(server, counter, kill, start):
    """The options of the suite that don't depend on the package."""
    given = {
        "url": f"{server}/charges",
        "other-url": f"{server}/refunds",
        "body": '{"amount": 1, "order": "{unique}"}',
        "other-body": '{"amount": 2, "order": "{unique}"}',
        "refused-body": '{"outcome": 402}',
        "crashing-body": '{"outcome": 500}',
        "throttled-body": '{"outcome": 429, "n": "{unique}"}',
        "unavailable-body": '{"outcome": 503, "n": "{unique}"}',
        "header": "Authorization: alice",
        "other-account": "Authorization: bob",
        "count-command": counter,
        "kill": shlex.join(["sh", "-c", kill]),
        "restart": shlex.join(["sh", "-c", start]),
        "timeout": "60",
        "patience": "75",  # longer than any lock here, so that an abandoned request is taken over
    }
    return {f"--{name}": value for name, value in given.items()}


@contextmanager
def serving(row, directory):
    """:returns: the options of the suite, as names and values."""
    with ExitStack() as stack:
        if row.store.startswith("Redis"):
            os.environ["REDIS"] = f"unix://{stack.enter_context(running_redis()).socket}"
        yield stack.enter_context(listening(row, directory))


@contextmanager
def listening(row, directory):
    port, log = free_port(), directory / "server.log"
    effects, group = directory / "effects", directory / "group"
    effects.touch()
    os.environ.update(PACKAGE=row.package, STORE=row.store, EFFECTS=str(effects), PORT=str(port))
    os.environ["PYTHONPATH"] = str(SERVERS)
    command = install(row, Path(os.environ["COMPARISON"]))
    if "gunicorn" in command:
        subprocess.run([command[0], "-W", "ignore", str(SERVERS / "django_server.py")], check=True)
    if command[-1].startswith("--"):
        command.append(f"127.0.0.1:{port}" if command[-1] == "--bind" else str(port))
    start = f"setsid {shlex.join(command)} >>{log} 2>&1 & echo $! > {group}"
    kill = f"kill -KILL -$(cat {group})"
    subprocess.run(["sh", "-c", start], check=True)
    try:
        wait_until(lambda: answers(("127.0.0.1", port)), f"{row.name} listens: see {log}", 60)
        yield arguments(f"http://127.0.0.1:{port}", f"sh -c 'wc -l < {effects}'", kill, start)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(int(group.read_text()), signal.SIGKILL)


def judge_row(row):
    """Run the suite's command. Returns the verdict and the detail of each case."""
    with tempfile.TemporaryDirectory(prefix="comparison-") as directory, serving(row, Path(directory)) as options:
        if row.store.startswith("memory"):  # it doesn't claim to survive a crash
            del options["--kill"], options["--restart"]
        results = run_suite(row, Path(directory), options)
        results |= {f"long-{name}": each for name, each in run_suite(row, Path(directory), options | LONG).items()}
    return results


def run_suite(row, directory, options):
    report = directory / "report.xml"
    command = [sys.executable, "-m", "idempotency_key_conformance", "--profile", row.profile, "--junit", str(report)]
    for name, value in (*options.items(), *(("--declare", each) for each in row.declared)):
        command += [name, value]
    path = os.pathsep.join([str(SUITE), os.environ["PYTHONPATH"]])
    ended = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True)
    if ended.returncode not in (0, 1):
        raise SystemExit(f"{row.name} could not be judged: {ended.stdout[-2000:]}{ended.stderr}")
    texts = {case.get("name"): _text_of(case[0]) for case in ET.parse(report).getroot().iter("testcase")}
    return {name: text.split(": ", 1) for name, text in texts.items()}


def _text_of(element):
    return element.get("message") or element.text


def cells_of(results):
    order = list(MARKS)
    worst = {head: min((results[case][0] for case in cases), key=order.index) for head, cases in COLUMNS.items()}
    for head, prefixes in PREFIXES.items():
        judged = [verdict for name, (verdict, _) in results.items() if name.startswith(prefixes)]
        worst[head] = min((verdict for verdict in judged if verdict != "not judged"), key=order.index)
    return {head: MARKS[verdict] for head, verdict in worst.items()}


def main():
    parser = argparse.ArgumentParser(prog="python -m tests.conformance.compare")
    parser.add_argument("rows", nargs="*", metavar="ROW", help=f"one of: {', '.join(row.name for row in ROWS)}")
    parser.add_argument("--directory", default=".tox/comparison", help="where packages are installed")
    options = parser.parse_args()
    os.environ["COMPARISON"] = str(Path(options.directory).resolve())
    lines = []
    for row in ROWS:
        if options.rows and row.name not in options.rows and row.package not in options.rows:
            continue
        results = judge_row(row)
        say(f"\n{row.name}, profile {row.profile}, declared: {', '.join(row.declared)}")
        for name, (verdict, detail) in results.items():
            say(f"  {verdict:10}  {name:24}  {detail[:150]}")
        cells = cells_of(results)
        cases = {name: verdict for name, (verdict, _) in results.items()}
        note("conformance", package=row.package, version=row.version, store=row.store, cells=cells, cases=cases)
        lines.append([row.name, row.version, *cells.values()])
    say("\n" + markdown(["package", "version", *COLUMNS, *PREFIXES], lines))


if __name__ == "__main__":
    main()
