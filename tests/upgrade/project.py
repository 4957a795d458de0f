"""A project that two releases of the package serve on one database: settings, URLs and views.

It uses only public names.
"""

import uuid
from datetime import timedelta

import environ

SECRET_KEY = "the same for both releases"
ALLOWED_HOSTS = ["testserver"]
INSTALLED_APPS = [
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "idempotency",
    "idempotency.outbox",
    "idempotency.contrib.dashboard",
]
ROOT_URLCONF = "tests.upgrade.project"
DATABASES = {"default": environ.Env().db("DATABASE_URL")}
USE_TZ = True

urlpatterns = []

#: Called at each place in a handler.
strike = lambda place: None  # noqa: E731 - replaced by serve.py


def declare():
    """Declare the operations, once Django has its settings."""
    from django.db import connection, transaction
    from django.http import JsonResponse
    from django.urls import path

    from idempotency import PARK, REEXECUTE, Completed, Reconcile, idempotent, require_claim
    from idempotency.accounts import Fixed
    from idempotency.outbox import publish

    def write(effect):
        with connection.cursor() as cursor:
            cursor.execute("INSERT INTO upgrade_effect (effect) VALUES (%s)", [effect])

    def act(request, operation):
        key = request.headers["Idempotency-Key"].strip('"')
        claim = require_claim()
        derived = str(claim.derive_key("payment"))
        write(f"{operation} {key}")
        write(f"derived {derived}")
        strike("wrote")
        return JsonResponse({"answer": uuid.uuid4().hex, "derived": derived, "attempt": claim.attempt}, status=201)

    def found(record):
        return Completed(JsonResponse({"derived": str(record.derive_key("payment"))}, status=201))

    # No test lasts half as long, so no lease is renewed.
    options = {"account": Fixed("shop"), "lease": timedelta(minutes=10)}

    @idempotent("upgrade.charge", **options, recovery=REEXECUTE)
    def charge(request):
        return act(request, "charge")

    @idempotent("upgrade.park", **options, transaction=False, recovery=PARK)
    def park(request):
        return act(request, "park")

    @idempotent("upgrade.ask", **options, transaction=False, recovery=Reconcile(found))
    def ask(request):
        return act(request, "ask")

    @idempotent("upgrade.steps", **options, transaction=False, recovery=REEXECUTE)
    def steps(request):
        number = require_claim().step("number", lambda: uuid.uuid4().hex)
        strike("stepped")
        return JsonResponse({"number": number}, status=201)

    @idempotent("upgrade.order", **options)
    def order(request):
        with transaction.atomic():
            publish("orders.placed", {"order": 71}, sender=f"{__name__}.send")
        return act(request, "order")

    views = {"charge": charge, "park": park, "ask": ask, "steps": steps, "order": order}
    urlpatterns.extend(path(f"{name}/", view) for name, view in views.items())


#: The messages that this process's relay has sent.
sent = []


def send(message):
    sent.append([message.topic, message.payload])
