"""The sample project's charges, and what the suite needs: slow ones, failing ones, a second path, a counter."""

import time
from uuid import uuid4

from django.db.models.signals import post_save
from django.dispatch import receiver
from django.http import HttpResponse, JsonResponse
from django.urls import include, path

from testproject.models import Charge
from testproject.views import ChargeViewSet

#: In seconds, so that duplicates arrive while it runs.
TAKES = 0.3


@receiver(post_save, sender=Charge)
def work(instance, **_):
    if instance.label.startswith("slow"):
        time.sleep(TAKES)  # the operation itself, during which duplicates arrive
    if instance.label == "broken":
        raise RuntimeError("This charge fails, as its client has asked for.")


def count(request):
    return HttpResponse(str(Charge.objects.count()))


def handler500(request):
    """No two answers are equal, so that a recorded one is known."""
    return JsonResponse({"error": uuid4().hex}, status=500)


urlpatterns = [
    path("", include("testproject.urls")),
    path("count/", count),
    path("refunds/", ChargeViewSet.as_view({"post": "create"})),
]
