"""``EVERY_ROUTE``: each unsafe route is protected if a request brings a key, and nothing changes if it doesn't."""

import functools
from typing import Any

import pytest
from django.contrib import admin
from django.contrib.auth.decorators import login_required, permission_required
from django.db import transaction
from django.http import HttpRequest, HttpResponse
from django.urls import get_resolver, include, path, resolve, reverse
from django.utils import translation
from django.utils.decorators import method_decorator
from django.utils.functional import lazy
from django.utils.translation import get_language
from django.views import View
from django.views.decorators.csrf import csrf_exempt
from django.views.decorators.http import require_POST
from drf_spectacular.generators import SchemaGenerator
from drf_spectacular.utils import extend_schema
from rest_framework import viewsets
from rest_framework.decorators import action, api_view, permission_classes
from rest_framework.permissions import BasePermission
from rest_framework.routers import SimpleRouter
from rest_framework.views import APIView

from idempotency import idempotent
from idempotency.contrib.spectacular import AutoSchema
from idempotency.http import every_route
from idempotency.http.checks import check_atomic_requests, check_every_route
from idempotency.http.route_audit import audit
from idempotency.models import IdempotencyRecord
from testproject.models import Transfer
from tests.http.callers import effects, records, replayed
from tests.http.serving import Calling, served
from tests.http.test_class_handlers import custom
from tests.http.views import Actions, AsyncView, LabelSerializer, PlainView, async_answer, drf_answer, plain_answer

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.once]


@pytest.fixture(autouse=True)
def _every_route(settings, middleware):
    settings.IDEMPOTENCY = {"EVERY_ROUTE": True, "EXCEPT_ROUTES": ["/hooks/*", "signup", "tests.*.excepted"]}
    settings.ROOT_URLCONF = ()  # protecting the sample's routes would last for other tests


class Stock(Actions, viewsets.ViewSet):
    @action(detail=False, methods=["post", "get"])
    def both(self, request):
        return drf_answer(request)


def excepted(request):
    return plain_answer(request)


def keeping_keywords(view):
    """A decorator with keyword-only defaults and a variable that is not assigned."""

    @functools.wraps(view)
    def wrapper(request, note="", *args, status="201", **kwargs):
        _ = lambda: never  # noqa: E731
        return view(request, *args, **kwargs)

    if not callable(view):
        never = None
    return wrapper


KINDS = {
    "function": served(lambda request: plain_answer(request)),
    "decorated": served(require_POST(keeping_keywords(plain_answer))),
    "async": served(async_answer),
    "class": served(PlainView.as_view()),
    "async class": served(AsyncView.as_view()),
    "bound by initkwargs": served(PlainView.as_view(http_method_names=["post"])),
    "api_view": api_view(["POST", "GET"])(drf_answer),
    "viewset": Stock.as_view({"post": "create"}),
    "action of two methods": Stock.as_view({"post": "both", "get": "both"}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_request_is_protected_by_a_key(alice, settings, kind, transport, atomic):
    if atomic and "async" in kind:
        pytest.skip("Django refuses async views with ATOMIC_REQUESTS")
    settings.ROOT_URLCONF = (path("", KINDS[kind], name="transfers"),)
    first, replay = replayed(alice)
    assert (first["Idempotency-Status"], replay["Idempotency-Status"]) == ("executed", "replayed")
    assert IdempotencyRecord.objects.get().operation == "route:transfers"
    before = effects()
    for number in (1, 2):
        answer = alice.post()
        assert (answer.status_code, effects()) == (201, before + number)
        assert answer.json()["operation"] is None
        assert answer.json()["in_transaction"] == atomic
    assert len(records()) == 1
    assert check_atomic_requests(None) == []


@pytest.mark.parametrize("method", ["PUT", "PATCH", "DELETE"])
def test_every_unsafe_method_is_protected_and_no_safe_one(alice, serve, method):
    serve(lambda request: plain_answer(request))
    replayed(alice, method=method)
    assert IdempotencyRecord.objects.get().operation == "route:/"
    assert [alice.get(key="k")["Idempotency-Status"] for _ in range(2)] == ["ignored"] * 2
    assert (effects(), records()) == (3, [("completed", 1)])


class Denying(BasePermission):
    denied = False

    def has_permission(self, request, view):
        return not self.denied


def test_what_is_above_the_handler_runs_before_a_replay(alice, serve, monkeypatch):
    serve(
        login_required(plain_answer),
        **{
            "permission/": permission_required("auth.add_user", raise_exception=True)(plain_answer),
            "drf/": api_view(["POST"])(permission_classes([Denying])(drf_answer)),
            "route/": Stock.as_view({"post": "create"}, permission_classes=[Denying]),
        },
    )
    replayed(alice, key="a")
    replayed(alice, "/drf/", key="b")
    assert alice.post("/permission/", key="c").status_code == 403
    monkeypatch.setattr(Denying, "denied", True)
    assert [alice.post(url, key="b").status_code for url in ("/drf/", "/route/")] == [403, 403]


def test_a_view_that_is_above_its_own_login_is_not_changed_for_others(alice, serve):
    serve(PlainView.as_view(), **{"function/": plain_answer})
    replayed(alice)
    replayed(alice, "/function/", key="l")
    assert PlainView.post.__qualname__ == "PlainView.post"
    assert not hasattr(PlainView.post, "operation")
    assert not hasattr(plain_answer, "operation")


def test_named_exceptions_and_djangos_admin_are_left_alone(alice, settings):
    settings.ROOT_URLCONF = (
        path("hooks/shop/", served(plain_answer)),
        path("signup/", served(plain_answer), name="signup"),
        path("view/", served(excepted)),
        path("admin/", admin.site.urls),
    )
    for url in ("/hooks/shop/", "/signup/", "/view/", "/admin/auth/user/add/"):
        assert alice.post(url, key="k")["Idempotency-Status"] == "ignored"
    assert (records(), check_every_route(None)) == ([], [])


def test_a_route_that_has_an_operation_keeps_it(alice, settings, atomic):
    class Mixed(View):
        post = idempotent("tests.own")(PlainView.post)
        put = patch = PlainView.post

    settings.ROOT_URLCONF = (path("", served(Mixed.as_view()), name="mixed"),)
    replayed(alice, key="a")
    replayed(alice, method="PUT", key="b")
    replayed(alice, method="PATCH", key="c")
    assert set(IdempotencyRecord.objects.values_list("operation", flat=True)) == {"tests.own", "route:mixed"}
    assert alice.post()["Idempotency-Status"] == "not-recorded"  # its own operation needs a key
    assert alice.request("PUT").json()["in_transaction"] == atomic


@method_decorator(transaction.atomic, name="dispatch")
class InTransaction(PlainView):
    pass


class ByModel(View):
    model = ""

    def post(self, request):
        plain_answer(request)
        return HttpResponse(self.model)


def test_two_views_of_one_name_are_two_operations(alice, settings):
    def answering(text):
        return served(lambda request: plain_answer(request) and HttpResponse(text))

    settings.ROOT_URLCONF = (
        path("one/", answering("one"), name="create"),
        path("two/", answering("two"), name="create"),
        path("three/", include([path("", served(ByModel.as_view(model="three")), name="new")])),
        path("four/", include([path("", served(ByModel.as_view(model="four")), name="new")])),
        *(path(f"{name}/", Stock.as_view({"post": name}), name="stock") for name in ("create", "pay")),
        path("other/", answering("other"), name="other"),
    )
    for model in ("one", "two", "three", "four"):
        first, _ = replayed(alice, f"/{model}/")
        assert first.content == model.encode()
    for url in ("/create/", "/pay/", "/other/"):
        replayed(alice, url)
    names = IdempotencyRecord.objects.order_by("-pk").values_list("operation", flat=True)
    assert [*names[:3]] == ["route:other", "route:/pay/", "route:/create/"]


@pytest.mark.usefixtures("atomic_requests")
def test_a_view_that_the_project_has_exempted_stays_without_a_transaction(alice, serve):
    serve(transaction.non_atomic_requests(lambda request: plain_answer(request)))
    assert alice.post().json()["in_transaction"] is False


def test_two_patterns_of_one_view_are_one_operation(alice, settings):
    view = [served(ByModel.as_view(model="one")) for _ in range(2)]
    settings.ROOT_URLCONF = (path("one", view[0], name="create"), path("one/", view[1], name="create"))
    assert alice.post("/one", key="k").content == b"one"
    assert alice.post("/one/", key="k")["Idempotency-Replayed"] == "true"


class Slotted:
    """A view that has no attributes."""

    __slots__ = ()

    def __call__(self, request):
        return plain_answer(request)


class Registered(View):
    """A class that a subclass has to say more of than its body."""

    def __init_subclass__(cls, *, kind, **others):
        super().__init_subclass__(**others)


class Registering(Registered, kind="shop"):
    post = PlainView.post


class OfSite(PlainView):
    @classmethod
    def as_view(cls, site, **initkwargs):
        return super().as_view(**initkwargs)


def test_a_class_that_can_not_be_protected_breaks_no_other_route(alice, serve):
    others = {"registered/": Registering.as_view(), "site/": OfSite.as_view("site"), "slots/": Slotted()}
    serve(lambda request: plain_answer(request), **others)
    replayed(alice, "/slots/", key="s")
    for url in ("/registered/", "/site/"):
        assert alice.post(url, key="k")["Idempotency-Status"] == "ignored"
    replayed(alice)
    reasons = [reason for route in audit().routes for reason in route.reasons]
    assert any("missing 1 required keyword-only argument: 'kind'" in reason for reason in reasons)
    assert any("missing 1 required positional argument: 'site'" in reason for reason in reasons)


def test_an_exception_holds_for_a_pattern_that_is_included_elsewhere_too(alice, settings):
    included = [path("create/", served(lambda request: plain_answer(request)))]
    settings.ROOT_URLCONF = (path("api/", include(included)), path("hooks/", include(included)))
    assert alice.post("/hooks/create/", key="k")["Idempotency-Status"] == "ignored"
    [api, hooks] = audit().routes
    assert "The same pattern is included in an excepted place, too." in api.reasons[1]
    assert (api.operation, hooks.operation) == (None, None)


def test_the_language_of_the_first_request_names_no_operation(alice, settings, monkeypatch):
    settings.USE_I18N = True
    monkeypatch.setattr(translation, "_trans", type(translation._trans)())  # it has read the setting before
    settings.LANGUAGE_CODE = "fr"
    route = lazy(lambda: {"de": "laden/", "fr": "magasin/"}.get(get_language(), "shop/"), str)()
    settings.MIDDLEWARE = ["django.middleware.locale.LocaleMiddleware", *settings.MIDDLEWARE]
    settings.ROOT_URLCONF = (path(route, served(lambda request: plain_answer(request))),)
    assert alice.post("/laden/", key="k", headers={"Accept-Language": "de"}).status_code == 201
    assert IdempotencyRecord.objects.get().operation == "route:/magasin/"
    settings.LANGUAGE_CODE = "de"
    assert {found.route for found in audit().routes} == {"/laden/"}


def test_the_audit_says_which_routes_got_it_this_way_and_which_could_not(alice, settings):
    router = SimpleRouter()
    router.register("stock", Stock, "stock")
    noted = PlainView.as_view()
    noted.login_required = False  # as login_not_required() does it
    settings.ROOT_URLCONF = (
        path("plain/", require_POST(plain_answer), name="plain"),
        path("object/", served(Calling(plain_answer))),
        path("custom/", served(custom(plain_answer))),
        path("noted/", noted),
        path("exempt/", csrf_exempt(plain_answer)),
        path("atomic/", served(InTransaction.as_view())),
        path("hooks/shop/", require_POST(plain_answer)),
        path("partial/", served(functools.partial(lambda number, request: plain_answer(request), 1))),
        path("api/", include(router.urls)),
        path("function/", api_view(["POST"])(drf_answer)),
    )
    found = {(route.method, route.route): route for route in audit().routes}
    plain = found["POST", "/plain/"]
    assert (plain.verdict, plain.operation and plain.operation.name) == ("protected", "route:plain")
    assert plain.reasons == ("EVERY_ROUTE protects it if the request brings a key.",)
    assert found["POST", "/api/stock/"].operation
    assert found["POST", "/atomic/"].verdict == "unprotected"
    assert "transaction.atomic is around the handler" in found["POST", "/atomic/"].reasons[0]
    assert found["POST", "/function/"].verdict == "protected"
    named = {"object": "tests.http.views.plain_answer", "partial": "functools.partial"}
    for url, name in {**named, "custom": "tests.http.views.plain_answer"}.items():
        why = f"EVERY_ROUTE can't protect it: The decorator {name} can't be put around"
        assert why in found["ANY", f"/{url}/"].reasons[1]
    assert resolve("/plain/").func.__name__ == "plain_answer"
    assert resolve("/exempt/").func.csrf_exempt
    assert resolve("/noted/").func.login_required is False
    [warning] = check_every_route(None)
    assert warning.id == "idempotency.W024"
    assert "/plain/ (" not in warning.msg
    # These could not be protected, and serve their requests as before.
    for url in ("/object/", "/partial/", "/custom/", "/atomic/"):
        assert f"{url} (" in warning.msg
        assert alice.post(url, key="k").status_code == 201
    assert records() == []
    assert reverse("plain") == "/plain/"
    assert ("POST", "/hooks/shop/") not in found or found["POST", "/hooks/shop/"].operation is None


OTHER_HOST = (path("", served(lambda request: plain_answer(request))),)


def other_host(get_response):
    """A middleware that chooses another URLconf, as one for the hosts of tenants does."""

    def respond(request):
        request.urlconf = OTHER_HOST
        return get_response(request)

    return respond


def test_the_project_of_another_host_is_protected_as_well(alice, settings):
    settings.MIDDLEWARE = [f"{__name__}.other_host", *settings.MIDDLEWARE]
    replayed(alice)


def described_keys(document):
    """Whether the key is required, by route and method, where a schema has it."""
    return {
        (route, method): parameter.get("required", False)
        for route, methods in document["paths"].items()
        for method, described in methods.items()
        for parameter in described.get("parameters", [])
        if parameter["name"] == "Idempotency-Key"
    }


def test_ninja_routes_are_protected_and_described(alice, settings):
    api = pytest.importorskip("ninja").NinjaAPI(urls_namespace="tests-every-route")

    @api.post("/transfers")
    def create(request: HttpRequest, amount: int) -> Any:
        transfer = Transfer.objects.create(account=alice.user, recipient="carol", amount=amount)
        return {"id": transfer.pk}

    @api.patch("/transfers")
    @idempotent("tests.ninja_own")
    def change(request: HttpRequest) -> Any:
        return {}

    @api.get("/transfers")
    def find(request: HttpRequest) -> Any:
        return []

    @api.api_operation(["GET", "POST"], "/both")
    def both(request: HttpRequest) -> Any: ...

    @api.post("/hooks")
    def hook(request: HttpRequest) -> Any: ...

    settings.IDEMPOTENCY = {"EVERY_ROUTE": True, "EXCEPT_ROUTES": ["/api/hooks"], "ACCOUNT": lambda request: "alice"}
    settings.ROOT_URLCONF = (path("api/", api.urls),)
    replayed(alice, "/api/transfers?amount=1")
    assert alice.post("/api/transfers?amount=2").status_code == 200
    assert alice.get("/api/transfers", key="k").json() == []
    assert alice.post("/api/transfers?amount=x", key="l").status_code == 422
    assert alice.request("PATCH", "/api/transfers", key="m").status_code == 200
    names = IdempotencyRecord.objects.order_by("pk").values_list("operation", flat=True)
    assert list(names) == ["route:tests-every-route:create", "tests.ninja_own"]
    document = alice.get("/api/openapi.json").json()
    assert described_keys(document) == {("/api/transfers", "post"): False, ("/api/transfers", "patch"): True}
    responses = document["paths"]["/api/transfers"]["post"]["responses"]
    assert responses.keys() == {"200", "400", "401", "409", "422", "503"}
    assert "idempotency_key_missing" not in responses["400"]["description"]


def test_spectacular_describes_the_key_of_the_routes_that_are_protected(alice, settings):
    class Described(Stock):
        schema = AutoSchema()
        serializer_class = LabelSerializer

    class Own(APIView):
        schema = AutoSchema()

        @extend_schema(request=LabelSerializer, responses=LabelSerializer)
        @idempotent("tests.spectacular_own")
        def post(self, request): ...

        @extend_schema(request=LabelSerializer, responses=LabelSerializer)
        def put(self, request): ...

    settings.ROOT_URLCONF = (
        path("stock/", Described.as_view({"post": "create", "get": "unprotected"})),
        path("both/", Described.as_view({"post": "both", "get": "both"})),
        path("own/", Own.as_view()),
        path("hooks/", Described.as_view({"post": "create"})),
    )
    settings.IDEMPOTENCY = {**settings.IDEMPOTENCY, "EXCEPT_ROUTES": ["/hooks/"]}
    alice.get("/stock/")
    document = SchemaGenerator(patterns=settings.ROOT_URLCONF).get_schema(request=None, public=True)
    optional = dict.fromkeys([("/stock/", "post"), ("/both/", "post"), ("/own/", "put")], False)
    assert described_keys(document) == {**optional, ("/own/", "post"): True}


def test_routes_are_protected_once_however_many_requests_wait(alice, serve, monkeypatch):
    serve(lambda request: plain_answer(request))

    class Waited:
        def __enter__(self):
            every_route.protected_resolvers.add(get_resolver())  # by the request that had the lock before

        def __exit__(self, *error): ...

    monkeypatch.setattr(every_route, "lock", Waited())
    assert alice.post(key="k")["Idempotency-Status"] == "ignored"


def test_a_route_is_protected_only_while_the_setting_is_on(alice, serve, settings):
    serve(lambda request: plain_answer(request))
    replayed(alice)
    before = effects()
    settings.IDEMPOTENCY = {}
    for _ in range(2):
        assert alice.post(key="k").json()["operation"] is None
    assert effects() == before + 2


def test_the_check_asks_for_the_middleware(settings):
    assert check_every_route(None) == []
    settings.MIDDLEWARE = []
    assert [message.id for message in check_every_route(None)] == ["idempotency.E044"]
    settings.IDEMPOTENCY = {}
    assert check_every_route(None) == []


def test_an_anonymous_caller_with_a_key_is_refused(anonymous, settings):
    settings.ROOT_URLCONF = (path("", lambda request: HttpResponse()),)
    assert [anonymous.post(key=key).status_code for key in (None, "k")] == [200, 401]
