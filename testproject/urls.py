"""Where the sample API's endpoints are."""

from __future__ import annotations

from django.contrib import admin
from django.urls import include, path
from rest_framework.routers import SimpleRouter

from . import views

router = SimpleRouter()
router.register("charges", views.ChargeViewSet, basename="charge")
router.register("unprotected/charges", views.UnprotectedChargeViewSet, basename="unprotected-charge")

urlpatterns = [
    path("", include(router.urls)),
    path("transfers/", views.create_transfer, name="transfer-list"),
    path("payouts/", views.create_payout, name="payout-list"),
    path("payouts/reexecute/", views.create_payout_reexecuted, name="payout-reexecute"),
    path("payouts/park/", views.create_payout_parked, name="payout-park"),
    path("unprotected/payouts/", views.create_unprotected_payout, name="unprotected-payout-list"),
    path("notifications/", views.create_notification, name="notification-list"),
    path("health/", views.health, name="health"),
    path("admin/", admin.site.urls),
]
