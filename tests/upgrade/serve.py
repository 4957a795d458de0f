"""``python serve.py``: one release, which does what lines of JSON on its input ask for, and answers with such lines."""

import json
import os
import sys
from io import StringIO

import django
import project
from django.core.management import call_command
from django.db import connection
from django.test import Client


def tell(**event):
    sys.__stdout__.write(json.dumps(event) + "\n")
    sys.__stdout__.flush()


def request(path, key, amount=1, at="", act=""):
    """Send a request to the project.

    :param at: a place in its handler.
    :param act: what happens there: ``die``, as when the process is killed, or ``hold``, until the next line.
    """

    def strike(place):
        if place != at:
            return
        if act == "die":
            os._exit(1)
        tell(held=place)
        sys.stdin.readline()

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


def command(name, *arguments):
    output = StringIO()
    try:
        call_command(name, *arguments, stdout=output, stderr=output, no_color=True)
        code = 0
    except SystemExit as end:
        code = int(end.code or 0)
    sent, project.sent[:] = [*project.sent], []
    return {"code": code, "output": output.getvalue(), "sent": sent}


def not_executed(key):
    from idempotency.models import IdempotencyRecord
    from idempotency.operate.resolutions import mark_not_executed

    mark_not_executed(IdempotencyRecord.objects.get(idempotency_key=key), by="ops", reason="asked the provider")
    return {}


def main():
    os.environ["DJANGO_SETTINGS_MODULE"] = "project"
    django.setup()
    project.declare()
    import idempotency

    tell(file=idempotency.__file__, version=idempotency.__version__)
    jobs = {"request": request, "command": command, "not_executed": not_executed}
    for line in sys.stdin:
        job, arguments, options = json.loads(line)
        tell(**jobs[job](*arguments, **options))
    connection.close()


if __name__ == "__main__":
    main()
