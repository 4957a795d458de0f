"""The sample project's URLs."""

from pathlib import Path

from django.contrib import admin
from django.urls import include, path
from django.views.static import serve
from drf_spectacular.views import SpectacularAPIView
from rest_framework.routers import SimpleRouter

from . import orders, payments, views
from .lab import views as lab

#: Served by Django, so that the lab needs neither collectstatic nor a web server for static files.
LAB_FILES = Path(__file__).parent / "static" / "lab"

router = SimpleRouter()
router.register("charges", views.ChargeViewSet, basename="charge")
router.register("unprotected/charges", views.UnprotectedChargeViewSet, basename="unprotected-charge")

urlpatterns = [
    path("", include(router.urls)),
    path("transfers/", views.create_transfer, name="transfer-list"),
    path("payouts/", views.create_payout, name="payout-list"),
    path("payouts/reexecute/", views.create_payout_reexecuted, name="payout-reexecute"),
    path("payouts/park/", views.create_payout_parked, name="payout-park"),
    path("payments/", payments.create_payment, name="payment-list"),
    path("unprotected/payments/", payments.create_payment_without_begin, name="unprotected-payment-list"),
    path("orders/", orders.create_order, name="order-list"),
    path("unprotected/orders/", orders.create_unprotected_order, name="unprotected-order-list"),
    path("exports/", views.create_export, name="export-list"),
    path("exports/<uuid:pk>/", views.show_export, name="export-detail"),
    path("notifications/", views.create_notification, name="notification-list"),
    path("lab/", lab.show_lab, name="lab"),
    path("lab/cart/", lab.take_new_cart, name="lab-cart"),
    path("lab/pay/", lab.pay, name="lab-pay"),
    path("lab/unprotected/pay/", lab.pay_unprotected, name="lab-pay-unprotected"),
    path("lab/state/", lab.show_state, name="lab-state"),
    path("lab/static/<path:path>", serve, {"document_root": LAB_FILES}, name="lab-static"),
    path("schema/", SpectacularAPIView.as_view(), name="schema"),
    path("health/", views.health, name="health"),
    path("admin/", admin.site.urls),
]
