"""One route, to the view of the guide."""

from __future__ import annotations

from django.urls import path

from shop import views

urlpatterns = [path("charges", getattr(views, "create_charge", None) or views.ChargeView.as_view())]
