"""Where the views of ``tests.http.views`` are."""

from __future__ import annotations

from django.urls import path

from .views import KINDS, UNPROTECTED_ACTIONS

urlpatterns = [
    *(path(f"kinds/{kind}/", view) for kind, (view, _) in KINDS.items()),
    *(path(f"unprotected/{kind}/", view) for kind, view in UNPROTECTED_ACTIONS.items()),
]
