"""One path. What answers there is the operation of the cell that the process belongs to."""

from django.urls import path


def operate(request):
    """Be replaced by the worker, in its own process."""
    raise NotImplementedError


urlpatterns = [path("operate/", operate)]
