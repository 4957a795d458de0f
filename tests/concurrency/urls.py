"""Protected views with handlers that each test configures. An effect is a row of ``Transfer``."""

import json
from datetime import timedelta

from django.http import JsonResponse
from django.urls import path

from idempotency import PARK, REEXECUTE, Reconcile, Unknown, current_claim, idempotent
from testproject.models import Transfer

#: A lease that a test can wait out.
BRIEF = timedelta(seconds=0.6)


class Handler:
    """The calls before and after the views' effect, their reconciler's finding, and the attempts that have run."""

    def __init__(self):
        self.reset()

    def reset(self):
        self.before = lambda request: None
        self.after = lambda request: None
        self.find_out = lambda row: Unknown()
        self.attempts = []


handler = Handler()


def account_of(request):
    return request.headers.get("X-Account")


def effect(request):
    claim = current_claim()
    attempt = claim.attempt if claim else 0
    handler.attempts.append(attempt)
    handler.before(request)
    label = json.loads(request.body)["label"]
    transfer = Transfer.objects.create(account_id=int(request.headers["X-Account"]), amount=1, label=label)
    answer = handler.after(request)
    return answer or JsonResponse({"id": transfer.pk, "attempt": attempt}, status=201)


def declared(route, name, **policy):
    return path(route, idempotent(f"race.{name}", account=account_of, **policy)(effect))


def find_out(row):
    return handler.find_out(row)


OUTSIDE = {"transaction": False, "recovery": REEXECUTE}
urlpatterns = [
    declared("inside/", "inside"),
    declared("park/", "park", transaction=False, recovery=PARK),
    declared("reconciled/", "reconciled", transaction=False, recovery=Reconcile(find_out, max_attempts=4)),
    declared("heartbeat/", "heartbeat", lease=BRIEF, heartbeat=10 * BRIEF, **OUTSIDE),
    declared("long-lease/", "long_lease", heartbeat=timedelta(hours=1), **OUTSIDE),
    declared("heartbeat-inside/", "beating_inside", lease=BRIEF, heartbeat=10 * BRIEF),
    declared("capped/", "capped", lease=BRIEF, heartbeat=BRIEF, **OUTSIDE),
    declared("again/", "again", **OUTSIDE),
]
