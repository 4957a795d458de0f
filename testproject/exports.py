"""Exports: a request that starts a job, which a Celery worker runs.

The request writes the export and the job's message in the transaction of its record, and returns 202 immediately. A
duplicate also gets 202 until the job has finished, and then the result. The export's id is derived from the request's
scope, so a duplicate knows its URL even before the first request has committed.
"""

from typing import Any
from uuid import UUID

from django.db import transaction
from django.db.models import Count, Sum
from django.db.models.functions import Now
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.urls import reverse

from idempotency import Scope, current_claim
from idempotency.outbox import publish

from .models import Charge, Export

#: The job's name in its derived key.
JOB = "export"
TASK = "testproject.tasks.run_export"


def location_of(scope: Scope) -> str:
    """The URL of a request's export."""
    return reverse("export-detail", args=[scope.derive_key(JOB)])


def start_export(account_id: int, label: str) -> HttpResponse:
    """Start the current claim's export."""
    claim = current_claim()
    assert claim is not None, "start_export() is for views under @idempotent."
    export = Export.objects.create(pk=claim.derive_key(JOB), account_id=account_id, label=label)
    publish(TASK, {"export_id": str(export.pk)})
    claim.reference = str(export.pk)
    return answer_of(export)


def rebuild(reference: str, request: HttpRequest) -> HttpResponse:
    """The response for a duplicate: 202 while the job runs, and the result afterwards."""
    return answer_of(Export.objects.get(pk=UUID(reference)))


def answer_of(export: Export) -> HttpResponse:
    body: dict[str, Any] = {"id": str(export.pk), "label": export.label, "state": export.state}
    if export.finished_at is None:
        return JsonResponse(body, status=202, headers={"Location": reverse("export-detail", args=[export.pk])})
    return JsonResponse({**body, "charges": export.charges, "total": export.total})


def export_charges(export_id: str) -> dict[str, Any]:
    """Run the job: sum up the account's charges, in the transaction of the task's record."""
    with transaction.atomic():
        export = Export.objects.select_for_update().get(pk=UUID(export_id))
        sums = Charge.objects.filter(account_id=export.account_id).aggregate(charges=Count("pk"), total=Sum("amount"))
        export.charges, export.total = sums["charges"], sums["total"] or 0
        export.runs += 1
        export.finished_at = Now()
        export.save(update_fields=["charges", "total", "runs", "finished_at"])
    return {"charges": export.charges, "total": export.total}
