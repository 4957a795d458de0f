"""The URLs of the compared views."""

from __future__ import annotations

from django.urls import path

from testproject.views import health
from tools.benchmarks import views

urlpatterns = [
    path("health/", health),
    path("bare/", views.BareAtomicView.as_view()),
    path("handwritten/", views.HandwrittenView.as_view()),
    path("promises/", views.HandwrittenPromisesView.as_view()),
    path("package/", views.PackageView.as_view()),
]
