"""The sample project's charges, extended for the suite: simultaneous and failing ones, a second path, a counter."""

import threading
from uuid import uuid4

from django.db import connection
from django.db.models.signals import post_save
from django.dispatch import receiver
from django.http import HttpResponse, JsonResponse
from django.urls import include, path

from testproject.models import Charge
from testproject.views import ChargeViewSet

#: The limit of waits for expected requests, in seconds.
PATIENCE = 120.0


class Meeting:
    """Lets an operation wait until the expected number of requests run or are answered."""

    def __init__(self):
        self._arrived = threading.Condition()
        self._awaited = 0
        self._request = threading.local()

    @property
    def is_expecting(self):
        return self._awaited > 0

    def expect(self, count):
        with self._arrived:
            self._awaited = count

    def begin(self):
        """Begin a request, which may arrive once."""
        self._request.has_arrived = False

    def arrive(self):
        with self._arrived:
            if not self._request.has_arrived:
                self._request.has_arrived = True
                self._awaited -= 1
                self._arrived.notify_all()

    def wait(self):
        with self._arrived:
            if not self._arrived.wait_for(lambda: self._awaited <= 0, PATIENCE):
                raise TimeoutError(f"{self._awaited} more requests were expected")


meeting = Meeting()


def arriving(get_response):
    """A middleware."""

    def answer(request):
        if request.method != "POST":
            return get_response(request)
        meeting.begin()
        if connection.vendor == "sqlite" and meeting.is_expecting:
            # From here on, a duplicate may wait for the lock of the first request's transaction.
            request.body  # noqa: B018 - it is read to its last byte
            meeting.arrive()
        response = get_response(request)
        meeting.arrive()
        return response

    return answer


@receiver(post_save, sender=Charge)
def work(instance, **_):
    meeting.arrive()
    meeting.wait()
    if instance.label == "broken":
        raise RuntimeError("This charge fails, as requested.")


def expect(request, count):
    meeting.expect(count)
    return HttpResponse()


def count(request):
    return HttpResponse(str(Charge.objects.count()))


def handler500(request):
    """Make each answer different, so that a recorded one is recognised."""
    return JsonResponse({"error": uuid4().hex}, status=500)


urlpatterns = [
    path("", include("testproject.urls")),
    path("count/", count),
    path("expect/<int:count>/", expect),
    path("refunds/", ChargeViewSet.as_view({"post": "create"})),
]
