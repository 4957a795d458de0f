"""Where the sample API's endpoints are."""

from __future__ import annotations

from django.contrib import admin
from django.urls import include, path
from drf_spectacular.views import SpectacularAPIView
from rest_framework.routers import SimpleRouter

from . import orders, views

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
    path("orders/", orders.create_order, name="order-list"),
    path("unprotected/orders/", orders.create_unprotected_order, name="unprotected-order-list"),
    path("exports/", views.create_export, name="export-list"),
    path("exports/<uuid:pk>/", views.show_export, name="export-detail"),
    path("notifications/", views.create_notification, name="notification-list"),
    path("schema/", SpectacularAPIView.as_view(), name="schema"),
    path("health/", views.health, name="health"),
    path("admin/", admin.site.urls),
]
