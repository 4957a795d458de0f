"""A WSGI application whose process is killed once, at the fault point that the environment names."""

import os
import signal
from pathlib import Path

from django.conf import settings
from django.core.wsgi import get_wsgi_application
from django.http import JsonResponse
from django.urls import path

application = get_wsgi_application()

from idempotency import idempotent  # noqa: E402 - needs the settings
from idempotency.protocol.faults import fault_point  # noqa: E402
from testproject.models import Transfer  # noqa: E402


def die_once():
    try:
        Path(os.environ["KILLED"]).touch(exist_ok=False)
    except FileExistsError:
        return
    os.kill(os.getpid(), signal.SIGKILL)


@idempotent("tests.gunicorn", account=lambda request: "1")
def transfer(request):
    Transfer.objects.create(account_id=1, label=f"{request.headers['Idempotency-Key']}-0", amount=1)
    return JsonResponse({}, status=201)


settings.ROOT_URLCONF = (path("transfer/", transfer),)
fault_point[os.environ["KILL_AT"]] = die_once
