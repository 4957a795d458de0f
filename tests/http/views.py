"""Every kind of view that can be protected, and the same work without protection.

``POST /kinds/<kind>/`` is one protected operation. Every handler writes one ``Transfer`` and then follows the query
(``work``), so the rows show whether its transaction was committed.
"""

from asgiref.sync import sync_to_async
from django.db import connection, transaction
from django.http import JsonResponse
from django.urls import path
from django.utils.decorators import method_decorator
from django.views import View
from django.views.decorators.cache import never_cache
from rest_framework import serializers, viewsets
from rest_framework.decorators import action, api_view
from rest_framework.response import Response
from rest_framework.views import APIView

from idempotency import current_claim, idempotent
from idempotency.contrib.rest_framework import IdempotentMixin
from testproject.authentication import token_required
from testproject.models import Transfer


class CrashError(Exception):
    """An error that no exception handler handles."""


def work(request):
    """Write one row. Then ``?crash=1`` raises, and ``?status=…`` sets the status."""
    user = request.user
    transfer = Transfer.objects.create(account=user, recipient="carol", amount=1, label=request.method or "")
    if "crash" in request.GET:
        raise CrashError
    claim = current_claim()
    return {
        "id": transfer.pk,
        "operation": None if claim is None else claim.operation.name,
        "in_transaction": connection.in_atomic_block,
    }, int(request.GET.get("status", 201))


def plain_answer(request):
    answer, status = work(request)
    return JsonResponse(answer, status=status, headers={"Location": f"/transfers/{answer['id']}/"})


def drf_answer(request):
    answer, status = work(request)
    return Response(answer, status=status, headers={"Location": f"/transfers/{answer['id']}/"})


class PlainView(View):
    def post(self, request):
        return plain_answer(request)

    get = post


class MethodView(PlainView):
    @idempotent("kinds.method")
    def post(self, request):
        return plain_answer(request)


class HiddenView(PlainView):
    """Another decorator hides the protection."""

    post = method_decorator(never_cache)(idempotent("kinds.hidden")(PlainView.post))


class InheritedMethodView(MethodView):
    """The decorator is on the parent's method."""


class OverridingMethodView(MethodView):
    """The decorator is on a method that the handler calls."""

    def post(self, request):
        return super().post(request)


async def async_answer(request):
    return await sync_to_async(plain_answer)(request)


class AsyncView(View):
    async def post(self, request):
        return await async_answer(request)

    get = post


class AsyncMethodView(AsyncView):
    post = idempotent("kinds.async_method")(AsyncView.post)


class Methods:
    def post(self, request):
        return drf_answer(request)

    get = put = post


class LabelSerializer(serializers.ModelSerializer):
    class Meta:
        model = Transfer
        fields = ("label",)


class Actions:
    queryset = Transfer.objects.none()

    def create(self, request, *args, **kwargs):
        return drf_answer(request)

    list = create

    @action(detail=False, methods=["post"])
    def pay(self, request):
        return drf_answer(request)

    @action(detail=False, methods=["post"])
    def unprotected(self, request):
        return drf_answer(request)


class MethodAPIView(Methods, APIView):
    @idempotent("kinds.api_method")
    def post(self, request):
        return drf_answer(request)


class DecoratedViewSet(Actions, viewsets.ViewSet):
    create = idempotent("kinds.viewset")(Actions.create)

    @action(detail=False, methods=["post"])
    @idempotent("kinds.action")
    def pay(self, request):
        return drf_answer(request)


class ModelActions(Actions, viewsets.ModelViewSet):
    """A GenericViewSet with all of DRF's mixins, unprotected."""


class DecoratedModelViewSet(ModelActions):
    create = idempotent("kinds.model_viewset")(Actions.create)


class MixinAPIView(IdempotentMixin, Methods, APIView):
    idempotent_operations = {"post": "kinds.mixin_api_method"}


class MixinViewSet(IdempotentMixin, Actions, viewsets.ViewSet):
    idempotent_operations = {"create": "kinds.mixin_viewset", "pay": "kinds.mixin_action"}


class MixinModelViewSet(IdempotentMixin, ModelActions):
    idempotent_operations = {"create": "kinds.mixin_model_viewset"}


class BothViewSet(IdempotentMixin, DecoratedModelViewSet):
    idempotent_operations = {"create": "kinds.model_viewset"}


def _routed(view, post="create"):
    return view.as_view({"post": post, "get": "list"})


#: kind -> (view, the operation's name). Served at /kinds/<kind>/.
KINDS = {
    "function": (token_required(idempotent("kinds.function")(plain_answer)), "kinds.function"),
    "async_function": (token_required(idempotent("kinds.async_function")(async_answer)), "kinds.async_function"),
    "method": (token_required(MethodView.as_view()), "kinds.method"),
    "inherited_method": (token_required(InheritedMethodView.as_view()), "kinds.method"),
    "overriding_method": (token_required(OverridingMethodView.as_view()), "kinds.method"),
    "async_method": (token_required(AsyncMethodView.as_view()), "kinds.async_method"),
    "class_as_function": (token_required(idempotent("kinds.class")(PlainView.as_view())), "kinds.class"),
    "api_view": (
        transaction.non_atomic_requests(api_view(["GET", "POST"])(idempotent("kinds.api_view")(drf_answer))),
        "kinds.api_view",
    ),
    "api_method": (MethodAPIView.as_view(), "kinds.api_method"),
    "viewset": (_routed(DecoratedViewSet), "kinds.viewset"),
    "action": (_routed(DecoratedViewSet, "pay"), "kinds.action"),
    "model_viewset": (_routed(DecoratedModelViewSet), "kinds.model_viewset"),
    "mixin_api_method": (MixinAPIView.as_view(), "kinds.mixin_api_method"),
    "mixin_viewset": (_routed(MixinViewSet), "kinds.mixin_viewset"),
    "mixin_action": (_routed(MixinViewSet, "pay"), "kinds.mixin_action"),
    "mixin_model_viewset": (_routed(MixinModelViewSet), "kinds.mixin_model_viewset"),
    "both": (_routed(BothViewSet), "kinds.model_viewset"),
}

urlpatterns = [
    *(path(f"kinds/{kind}/", view) for kind, (view, _) in KINDS.items()),
    path("unprotected/", DecoratedViewSet.as_view({"post": "unprotected"})),
]
