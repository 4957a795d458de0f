"""The servers under load: gunicorn on PostgreSQL through PgBouncer, a provider, Redis, a relay, a sweep and Celery."""

import os
import subprocess
import sys
from contextlib import closing
from pathlib import Path

from testproject.harness.processes import Daemon, answers, free_port, short_directory
from testproject.harness.redis import running_redis
from testproject.provider import running_providers
from tests.crash.storms import server_to_stop
from tests.harness.pgbouncer import running_pgbouncer
from tests.harness.postgres import ClockedServer
from tests.harness.world import Database, environment
from tests.harness.zygote import ROOT, wait_until
from tests.soak.load import TOKEN

GUNICORN = "-m gunicorn testproject.wsgi --workers 3 --worker-class gthread --threads 4 --keep-alive 60 --preload"
GUNICORN += " --graceful-timeout 1 --no-control-socket --bind 127.0.0.1:"
COMMANDS = {
    "relay": "manage.py relay_outbox --watch 0.1",
    "sweep": "manage.py recover_idempotency --watch 0.5",
    "consumer": "-m celery --app testproject worker --concurrency 1 --without-gossip --without-mingle",
}


class Servers:
    """The running servers. They end with the stack."""

    def __init__(self, stack):
        directory = stack.enter_context(short_directory("soak-"))
        self.database = ClockedServer(stack.enter_context(server_to_stop()).url)
        with closing(Database(self.database.url)) as database:
            database.query("INSERT INTO authtoken_token (key, created, user_id) VALUES (%s, now(), 1)", TOKEN)
        self.pooler = stack.enter_context(running_pgbouncer(self.database.url))
        self.redis = stack.enter_context(running_redis())
        self.provider = stack.enter_context(running_providers(directory))[False]
        self.port = free_port()
        self.environment = environment(self.pooler.url) | {
            "DJANGO_SETTINGS_MODULE": "tests.soak.settings",
            "BROKER_URL": self.redis.url,
            "PROVIDER_URL": self.provider.url,
            "PROVIDER_TIMEOUT": "0.5",
            "PYTHONPATH": str(ROOT),
        }
        commands = {**COMMANDS, "web": f"{GUNICORN}{self.port}"}
        self.daemons = {
            name: Daemon(name, [*self._python, *command.split()], directory, environment=self.environment)
            for name, command in commands.items()
        }
        for daemon in self.daemons.values():
            stack.enter_context(daemon)
        wait_until(lambda: answers(("127.0.0.1", self.port)) and len(self.workers()) == 3, "the web server")
        #: The web worker that may be frozen but is never killed, so that its memory can be measured.
        self.elder = self.workers()[0]

    _python = (sys.executable, "-W", "ignore")

    def workers(self):
        """The web server's processes, oldest first."""
        web = self.daemons["web"].pid
        return [int(child) for child in Path(f"/proc/{web}/task/{web}/children").read_text().split()]

    def run(self, *arguments):
        """Run a Python command to its end."""
        command = [*self._python, *arguments]
        subprocess.run(command, cwd=ROOT, env=self.environment, check=True, stdout=subprocess.DEVNULL)

    def supervise(self):
        """Restart the consumer if it has ended, as a supervisor would, because kombu may fail without its broker."""
        consumer = self.daemons["consumer"]
        if not consumer.alive:
            consumer.start()

    def ended(self):
        """The processes that have ended by themselves, except the consumer."""
        others = [each for name, each in self.daemons.items() if name != "consumer" and not each.alive]
        found = [f"{each.name} has ended:\n{each.log_tail()}" for each in others]
        return found or ([] if self.elder in self.workers() else ["the oldest worker has ended"])

    def memory(self):
        """The resident bytes of the processes that are never killed."""
        web, sweep = (self.daemons[name].pid for name in ("web", "sweep"))
        processes = {"web server": web, "its oldest worker": self.elder, "sweep": sweep}
        pages = {name: Path(f"/proc/{pid}/statm").read_text().split()[1] for name, pid in processes.items()}
        return {f"memory, {name}": int(count) * os.sysconf("SC_PAGE_SIZE") for name, count in pages.items()}
