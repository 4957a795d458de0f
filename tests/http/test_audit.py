"""``manage.py idempotency_audit`` reports how each mutating route is protected, and any reason to doubt it."""

import functools
import json
import threading
from types import SimpleNamespace

import pytest
from django.contrib import admin
from django.contrib.auth.models import User
from django.core.management import CommandError
from django.db import connection, transaction
from django.http import FileResponse, HttpRequest, HttpResponse, StreamingHttpResponse
from django.urls import URLResolver, include, path, re_path
from django.urls.resolvers import LocalePrefixPattern
from django.utils.decorators import method_decorator
from django.views import View
from django.views.decorators.csrf import csrf_exempt
from django.views.decorators.http import require_POST, require_safe
from django.views.generic import CreateView, FormView, RedirectView
from rest_framework.decorators import action, api_view
from rest_framework.generics import GenericAPIView
from rest_framework.mixins import CreateModelMixin
from rest_framework.permissions import IsAuthenticated
from rest_framework.routers import DefaultRouter
from rest_framework.views import APIView

from idempotency import PARK, Operation, current_claim, hold, idempotent
from idempotency.contrib.rest_framework import IdempotentMixin
from idempotency.views.route_audit import audit
from idempotency.views.routes import places
from tests.commands import run_command
from tests.http.test_checks_before_replays import IsOwner
from tests.http.test_checks_of_urls import ByModel, TransfersElsewhere
from tests.http.views import ModelActions, PlainView, plain_answer
from tests.operations import forgetting_operations
from tests.records import HOUR, make_records

pytestmark = pytest.mark.urls(__name__)


def custom(view):
    after = None

    @functools.wraps(view)
    def check(request, **kwargs):
        return call(request, **kwargs) or after or check  # noqa: F821

    call = functools.partial(view)
    del after  # leaves an empty cell
    return check


def page(request):
    return HttpResponse()


class Instance:
    def __call__(self, request):
        return page(request)


class HasPermission:  # not a subclass of BasePermission, which Django REST framework accepts
    def has_permission(self, request, view):
        return True


class Transfers(IdempotentMixin, ModelActions):
    idempotent_operations = {name: f"audit.{name}" for name in ("create", "pay", "partial_update", "refund", "cancel")}
    permission_classes = (IsAuthenticated | IsOwner,)

    @action(detail=True, methods=["post"], permission_classes=[HasPermission])
    def refund(self, request, pk): ...

    @action(detail=True, methods=["post", "put"])
    def cancel(self, request, pk): ...


class Sending(APIView):  # its handler looks the object up itself
    permission_classes = [IsAuthenticated | IsOwner]

    @idempotent("audit.sending")
    def post(self, request, pk): ...


class OnlyRead(ModelActions):
    http_method_names = ["get", "head"]


class Dispatching(View):  # has no handlers, like GraphQL views
    def dispatch(self, request, *args, **kwargs):
        return page(request)


@method_decorator([transaction.atomic], name="dispatch")
class InsideAtomic(PlainView):  # hides its protection, so the class does not refuse it
    post = method_decorator(csrf_exempt)(idempotent("audit.atomic_dispatch")(PlainView.post))


class Durable(PlainView):
    def dispatch(self, request, *args, **kwargs):
        return super().dispatch(request, *args, **kwargs)

    @idempotent("audit.durable")
    def post(self, request):
        def inside():
            with transaction.atomic(durable=True):
                return plain_answer(request)

        return inside()

    put = idempotent("audit.durable_outside", transaction=False, recovery=PARK)(PlainView.post)


class Ending(PlainView):
    @idempotent("audit.ending")
    def post(self, request):
        transaction.commit()
        return [StreamingHttpResponse, FileResponse]

    put = idempotent("audit.rebuilt", rebuild=repr, transaction=False, recovery=PARK)(post.view)


class ProtectedForPOST(CreateView):
    post = idempotent("audit.post_only", methods=["POST"])(PlainView.post)


class Decorated(PlainView):
    post = method_decorator(csrf_exempt)(idempotent("audit.decorated")(PlainView.post))


class Overriding(Decorated):
    def post(self, request):
        return super().post(request)


class Copying(Decorated):
    @functools.wraps(Decorated.post)
    def post(self, request):
        return plain_answer(request)


protected = idempotent("audit.function", key_required=False)(plain_answer)
outside = idempotent("audit.outside", transaction=False, recovery=PARK)(functools.partial(plain_answer))
router = DefaultRouter()
router.register("transfers", Transfers)
router.register("read", OnlyRead, basename="read")

urlpatterns = [
    path("pages/", page),
    path("pages/instance/", Instance()),
    path("plain/", require_POST(csrf_exempt(plain_answer))),
    path("class/", PlainView.as_view()),
    path("class/copied/", functools.wraps(PlainView.as_view())(custom(page))),
    path("class/created/", ByModel.as_view()),
    path("class/created/<int:pk>/", ByModel.as_view()),
    path("class/read/", PlainView.as_view(http_method_names=["get"])),
    path("class/safe/", require_safe(PlainView.as_view())),
    path("class/redirect/", RedirectView.as_view(url="/")),
    path("class/dispatch/", Dispatching.as_view()),
    path("class/form/", FormView.as_view()),
    path("class/form/put/", FormView.as_view(http_method_names=["put"])),
    path("protected/", require_POST(custom(protected)), name="protected"),
    path("protected/copied/", functools.wraps(protected)(page)),
    path("protected/put/", idempotent("audit.put", methods=["PUT"])(plain_answer)),
    path("protected/partial/", functools.partial(outside)),
    path("protected/around/", idempotent("audit.around")(PlainView.as_view())),
    path("protected/custom/", idempotent("audit.custom")(transaction.atomic(plain_answer))),
    path("protected/atomic/", transaction.atomic(idempotent("audit.atomic")(plain_answer))),
    path("protected/dispatch/", InsideAtomic.as_view()),
    path("protected/durable/", Durable.as_view()),
    path("protected/ending/", Ending.as_view()),
    path("protected/form/", ProtectedForPOST.as_view()),
    path("protected/methods/", Decorated.as_view()),
    path("protected/overridden/", Overriding.as_view()),
    path("protected/copied/method/", Copying.as_view()),
    path("drf/", include((router.urls, "drf"), namespace="drf")),
    path("drf/sending/<int:pk>/", Sending.as_view()),
    path("drf/only/read/", Transfers.as_view({"get": "list", "post": "create"}, http_method_names=["get"])),
    path("drf/export.<format>", api_view(["POST"])(plain_answer)),
    path("drf/function/", api_view(["POST"])(idempotent("audit.api_view")(plain_answer))),
    path("drf/function/atomic/", api_view(["POST"])(transaction.atomic(idempotent("audit.in_atomic")(plain_answer)))),
    path("drf/function/plain/", api_view(["POST", "GET"])(plain_answer)),
    re_path(r"^regex\.(?P<pk>[0-9]+)/(?:x|y)?$", require_POST(plain_answer), name="regex"),
    path("admin/", admin.site.urls),
    path("office/", include(([path("pay/", require_POST(plain_answer))], "admin"))),
    # The result of i18n_patterns() under USE_I18N.
    URLResolver(LocalePrefixPattern(), [path("translated/", require_POST(plain_answer), name="translated")]),
]

#: The expected report: the verdict, the operation and a part of the reasons, by method and path.
EXPECTED = {
    ("ANY", "/pages/"): ("undeclared", None, ""),
    ("ANY", "/pages/instance/"): ("undeclared", None, ""),
    ("ANY", "/plain/"): ("undeclared", None, ""),
    ("POST", "/class/"): ("unprotected", None, ""),
    ("ANY", "/class/copied/"): ("undeclared", None, ""),
    ("POST", "/class/created/"): ("protected", "urls.post", ""),
    ("POST", "/class/created/<int:pk>/"): ("protected", "urls.post", ""),
    ("POST", "/class/safe/"): ("unprotected", None, ""),
    ("POST", "/class/form/"): ("unprotected", None, ""),
    ("PUT", "/class/form/put/"): ("unprotected", None, ""),
    ("ANY", "/class/dispatch/"): ("undeclared", None, "its dispatch() may serve any method"),
    ("ANY", "/protected/copied/"): ("undeclared", None, ""),
    ("PUT", "/protected/put/"): ("protected", "audit.put", ""),
    ("ANY", "/protected/put/"): ("undeclared", None, ""),
    ("POST", "/protected/"): ("protected", "audit.function", "without a key runs unprotected"),
    ("PATCH", "/protected/"): ("protected", "audit.function", ""),
    ("POST", "/protected/partial/"): ("doubtful", "audit.outside", "seems to write rows without begin()"),
    ("PATCH", "/protected/partial/"): ("doubtful", "audit.outside", ""),
    ("POST", "/protected/around/"): ("protected", "audit.around", ""),
    ("POST", "/protected/custom/"): ("protected", "audit.custom", ""),
    ("PATCH", "/protected/custom/"): ("protected", "audit.custom", ""),
    ("POST", "/protected/atomic/"): ("broken", "audit.atomic", "transaction.atomic is above"),
    ("PATCH", "/protected/atomic/"): ("broken", "audit.atomic", ""),
    ("POST", "/protected/dispatch/"): (
        "broken",
        "audit.atomic_dispatch",
        "transaction.atomic is on InsideAtomic.dispatch()",
    ),
    ("POST", "/protected/durable/"): ("doubtful", "audit.durable", "Leave durable=True out, or declare"),
    ("POST", "/protected/ending/"): ("doubtful", "audit.ending", "commit, which Django refuses within"),
    ("PUT", "/protected/ending/"): ("protected", "audit.rebuilt", ""),
    ("PUT", "/protected/durable/"): ("doubtful", "audit.durable_outside", "Durable.dispatch() runs before a replay"),
    ("POST", "/protected/form/"): ("protected", "audit.post_only", ""),
    ("PUT", "/protected/form/"): ("unprotected", None, ""),
    ("POST", "/protected/methods/"): ("protected", "audit.decorated", ""),
    ("POST", "/protected/overridden/"): ("unprotected", None, "overrides a handler that operation 'audit.decorated'"),
    ("POST", "/protected/copied/method/"): ("unprotected", None, "is protected only if it calls that handler"),
    ("POST", "/drf/transfers/"): ("protected", "audit.create", ""),
    ("POST", "/drf/transfers/pay/"): ("protected", "audit.pay", ""),
    ("POST", "/drf/transfers/unprotected/"): ("unprotected", None, ""),
    ("PUT", "/drf/transfers/<pk>/"): ("idempotent", None, ""),
    ("PATCH", "/drf/transfers/<pk>/"): ("protected", "audit.partial_update", ""),
    ("DELETE", "/drf/transfers/<pk>/"): ("idempotent", None, ""),
    ("POST", "/drf/transfers/<pk>/refund/"): ("protected", "audit.refund", ""),
    ("POST", "/drf/transfers/<pk>/cancel/"): ("protected", "audit.cancel", ""),
    ("PUT", "/drf/transfers/<pk>/cancel/"): ("protected", "audit.cancel", ""),
    ("POST", "/drf/sending/<int:pk>/"): ("doubtful", "audit.sending", "IsOwner.has_object_permission()"),
    ("POST", "/drf/export.<format>"): ("unprotected", None, ""),
    ("POST", "/drf/function/"): ("protected", "audit.api_view", ""),
    ("POST", "/drf/function/atomic/"): ("broken", "audit.in_atomic", "transaction.atomic is above"),
    ("POST", "/drf/function/plain/"): ("unprotected", None, ""),
    ("ANY", r"/regex\.<pk>/"): ("undeclared", None, ""),
    ("ANY", "/office/pay/"): ("undeclared", None, ""),
    ("ANY", "/<language>/translated/"): ("undeclared", None, ""),
}


def test_every_mutating_route_has_its_verdict():
    found = audit()
    assert sorted((route.method, route.route) for route in found.routes) == sorted(EXPECTED)
    for route in found.routes:
        verdict, operation, reason = EXPECTED[route.method, route.route]
        assert (str(route.verdict), getattr(route.operation, "name", None)) == (verdict, operation), route
        reasons = " ".join(route.reasons)
        assert reason in reasons
        assert ("without a key runs unprotected" in reasons) == (operation == "audit.function")
    assert found.admin_routes == sum(place.in_admin for place in places()) > 10
    # Views and URLs are named as in the project's code.
    named = {
        "/drf/transfers/pay/": (f"{__name__}.Transfers.pay", "drf:transfer-pay"),
        "/drf/function/plain/": ("tests.http.views.plain_answer", ""),
        "/plain/": ("tests.http.views.plain_answer", ""),
        "/pages/instance/": (f"{__name__}.Instance", ""),
        "/class/dispatch/": (f"{__name__}.Dispatching.dispatch", ""),
    }
    assert {route.route: (route.view, route.name) for route in found.routes if route.route in named} == named


def test_a_model_written_to_another_database_makes_a_route_doubtful(settings):
    settings.DATABASE_ROUTERS = [TransfersElsewhere()]
    created, _ = [route for route in audit().routes if route.operation and route.operation.name == "urls.post"]
    assert str(created.verdict) == "doubtful"
    assert "testproject.Transfer is written to another database" in created.reasons[0]


@pytest.mark.usefixtures("atomic_requests")
def test_a_protection_hidden_from_atomic_requests_is_broken():
    """Django opens a transaction around the view, so every request is refused."""
    reasons = {route.route: " ".join(route.reasons) for route in audit().routes if route.operation is not None}
    found = {place: reason for place, reason in reasons.items() if "ATOMIC_REQUESTS opens a transaction" in reason}
    below_api_view = {"/drf/function/", "/drf/function/atomic/"}
    assert set(found) == {"/protected/methods/", "/protected/partial/", "/protected/dispatch/"} | below_api_view
    assert "Put @idempotent above the other decorators of the method" in found["/protected/methods/"]
    assert "non_atomic_requests above all other decorators of the function" in found["/drf/function/"]


def test_routes_of_django_ninja_are_listed(settings):
    api = pytest.importorskip("ninja").NinjaAPI(urls_namespace="audit")

    @api.post("/pay")
    @idempotent("audit.ninja")
    def pay(request: HttpRequest) -> dict[str, str]:
        return {}

    @api.patch("/pay")
    def change(request: HttpRequest) -> dict[str, str]:
        return {}

    settings.ROOT_URLCONF = (path("api/", api.urls),)
    routes = audit().routes
    found = {(route.method, route.route): str(route.verdict) for route in routes}
    assert len(found) == len(routes)
    assert found.pop(("POST", "/api/pay")) == "protected"
    assert found.pop(("PATCH", "/api/pay")) == "unprotected"
    assert set(found.values()) == {"undeclared"}  # Ninja's built-in pages


def test_the_command_lists_each_route_with_its_protection():
    code, lines, _ = run_command("idempotency_audit")
    assert code == 0
    (line,) = [line for line in lines if " /protected/partial/ " in line and line.startswith("POST")]
    assert line.split("  ")[-1].strip() == "audit.outside: outside of a transaction, PARK"
    assert any(line.split() == ["POST", "/class/", "unprotected", "tests.http.views.PlainView.post"] for line in lines)
    assert any("routes of Django's admin left out (--include-admin)" in line for line in lines)
    assert "can't detect a provider call inside a transaction" in lines[-1]
    assert len(run_command("idempotency_audit", "--include-admin")[1]) > len(lines)


def test_the_command_writes_json():
    code, lines, _ = run_command("idempotency_audit", "--json")
    found = json.loads("\n".join(lines))
    assert code == 0
    assert found["summary"]["broken"] == 4
    (route,) = [route for route in found["routes"] if (route["name"], route["method"]) == ("protected", "POST")]
    assert route == {
        "method": "POST",
        "route": "/protected/",
        "name": "protected",
        "view": "tests.http.views.plain_answer",
        "verdict": "protected",
        "operation": "audit.function",
        "recovery": "reexecute",
        "transaction": True,
        "key_required": False,
        "reasons": ["A request without a key runs unprotected (key_required=False)."],
    }
    assert all(each.keys() == route.keys() for each in found["routes"])


def test_the_command_fails_on_the_named_verdicts():
    fail = ["idempotency_audit", "--fail-on", "unprotected", "--fail-on", "undeclared"]
    with pytest.raises(CommandError, match=r"^Routes: 10 unprotected, 10 undeclared\.$") as failed:
        run_command(*fail)
    assert failed.value.returncode == 1
    patterns = ["/pages/*", f"{__name__}.*", "/drf/*", "translated", "regex", "tests.http.views.*", "/class/form/*"]
    code, lines, _ = run_command(*fail, *(f"--allow={pattern}" for pattern in patterns))
    assert code == 0
    assert any(line.split()[:3] == ["POST", "/class/", "allowed"] for line in lines)
    assert any(line.split() == ["20", "not", "protected,", "as", "allowed"] for line in lines)
    with pytest.raises(CommandError, match=r"No route matches '/no/such/\*'") as failed:
        run_command("idempotency_audit", "--allow", "/no/such/*")
    assert failed.value.returncode == 2


@pytest.mark.django_db
@pytest.mark.failure_112
@pytest.mark.urls("tests.base.urls")
def test_the_command_lists_operations_of_records_that_no_code_declares():
    make_records(2, operation="charges.renamed", expires=HOUR)
    line = "No code declares operation 'charges.renamed', which has 2 of the newest records."
    assert line in run_command("idempotency_audit", "--database", "default")[1]
    assert line not in run_command("idempotency_audit")[1]
    found = json.loads("\n".join(run_command("idempotency_audit", "--database", "default", "--json")[1]))
    assert found["undeclared_operations"] == {"charges.renamed": 2}


redis = provider = block = SimpleNamespace()


def lock_by_redis(request):
    return redis.lock("numbers")


def lock_in_a_closure(request):
    lock = threading.Lock()

    def allocate():
        with lock:
            return HttpResponse()

    return allocate()


def stream(request):
    return FileResponse(b"")


def begin_and_lock(request):
    current_claim().begin()
    return lock_by_redis(request)


class Creating(IdempotentMixin, CreateModelMixin, GenericAPIView):
    idempotent_operations = {"post": Operation.declare("audit.creating", transaction=False, recovery=PARK)}

    def post(self, request):
        return self.create(request)


@pytest.mark.parametrize(
    ("view", "is_in_transaction", "doubt"),
    [
        (lock_by_redis, True, "seems to take a lock (lock)"),
        (lock_by_redis, False, ""),
        (lambda request: connection.execute("SELECT pg_advisory_lock(42)"), True, "a lock (pg_advisory_lock)"),
        (lambda request: connection.execute("SELECT pg_advisory_xact_lock(42)"), True, ""),
        (lambda request: User.objects.select_for_update(), True, ""),
        (lambda request: lock_by_redis(request), True, "seems to take a lock (lock)"),
        (lock_in_a_closure, True, "seems to take a lock (Lock, lock)"),
        (lambda request: hold(redis.lock("numbers")), True, ""),
        (lambda request: block.clock(request), True, ""),
        (lambda request: User.objects.create(username=provider.charge()), False, "seems to write rows without begin()"),
        (lambda request: User.objects.create(username=provider.charge()), True, ""),
        (lambda request: User(username=provider.charge()).save(), False, "seems to write rows without begin()"),
        (lambda request: [User.objects.get(), provider.charge()], False, ""),
        (lambda request: [current_claim().begin(), User.objects.create()], False, ""),
        (begin_and_lock, False, "seems to take a lock (lock)"),
        (lambda request: stream(request), True, "names FileResponse, which can't be recorded"),
    ],
)
def test_names_in_the_code_of_a_handler_raise_doubts(view, is_in_transaction, doubt, settings):
    policy = {} if is_in_transaction else {"transaction": False, "recovery": PARK}
    with forgetting_operations("audit.code"):
        settings.ROOT_URLCONF = (path("code/", require_POST(idempotent("audit.code", **policy)(view))),)
        route, *_ = audit().routes
    assert (str(route.verdict), len(route.reasons)) == (("doubtful", 1) if doubt else ("protected", 0))
    assert doubt in "".join(route.reasons)
    assert ("idempotency.hold(" in "".join(route.reasons)) is ("lock" in doubt)


def test_a_method_of_the_class_that_writes_raises_a_doubt(settings):
    settings.ROOT_URLCONF = (path("code/", Creating.as_view()),)
    (route,) = audit().routes
    assert str(route.verdict) == "doubtful"
