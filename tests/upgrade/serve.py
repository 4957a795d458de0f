"""The jobs of a process that runs one release. Each process does one."""

import os

from django.db import connection
from django.test import Client

import idempotency
from tests.commands import run_command
from tests.upgrade import project

project.declare()


def run(spec, channel):
    """Called in each fork."""
    channel.tell(event="done", **JOBS[spec.pop("job")](channel, **spec))
    connection.close()


def identify(channel):
    return {"file": idempotency.__file__}


def request(channel, path, key, amount=1, at="", act=""):
    """Send a request to the project.

    :param at: a place in its handler.
    :param act: what happens there: ``die``, as if the process is killed, or ``hold``, until the test continues it.
    """

    def strike(place):
        if place != at:
            return
        if act == "die":
            os._exit(1)
        channel.tell(event="held")
        channel.wait()

    project.strike = strike
    response = Client(raise_request_exception=False).post(
        path, {"amount": amount}, content_type="application/json", headers={"Idempotency-Key": f'"{key}"'}
    )
    content = response.content.decode()
    return {
        "status": response.status_code,
        "body": content,
        "replayed": response.headers.get("Idempotency-Replayed") == "true",
        "code": response.json().get("code") if response.status_code >= 400 else None,
    }


def command(channel, name, arguments):
    code, _, _ = run_command(name, *arguments, no_color=True)
    return {"code": code, "sent": project.sent}


def not_executed(channel, key):
    from idempotency.models import IdempotencyRecord
    from idempotency.operate.resolutions import mark_not_executed

    mark_not_executed(IdempotencyRecord.objects.get(idempotency_key=key), by="ops", reason="asked the provider")
    return {}


JOBS = {"identify": identify, "request": request, "command": command, "not_executed": not_executed}
