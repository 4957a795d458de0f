"""System checks of the URLconf: models in another database than the records, transactions and adapters."""

import functools
import sys
from importlib import import_module

import pytest
from django.core.checks import run_checks
from django.core.exceptions import ImproperlyConfigured
from django.db import transaction
from django.http import HttpRequest
from django.urls import include, path
from django.utils.decorators import method_decorator
from django.views.decorators.cache import never_cache
from django.views.decorators.csrf import csrf_exempt
from django.views.decorators.http import condition, etag, last_modified
from django.views.generic import CreateView
from rest_framework import generics
from rest_framework.decorators import api_view, permission_classes
from rest_framework.routers import SimpleRouter

from idempotency import Operation, idempotent
from idempotency.checks import check_settings
from idempotency.contrib.rest_framework import IdempotentMixin
from idempotency.http import adapter as adapter_module
from idempotency.views import decorators
from idempotency.views.checks import (
    check_atomic_requests,
    check_declarations,
    check_models,
    check_ninja,
    check_preconditions,
    check_profiles,
)
from idempotency.views.route_audit import audit
from testproject.models import Transfer
from tests.http.serving import OUTSIDE
from tests.http.views import (
    HiddenView,
    LabelSerializer,
    Methods,
    MethodView,
    MixinAPIView,
    ModelActions,
    PlainView,
    plain_answer,
)

pytestmark = [pytest.mark.failure_27, pytest.mark.urls(__name__)]


class TransfersElsewhere:
    records = {"urls.put": "records", "urls.destroy": "elsewhere"}

    def db_for_write(self, model, **hints):
        return "elsewhere" if model is Transfer else self.records.get(hints.get("operation"))


def named():
    return [f"{each.id} {each.msg}" for each in run_checks(tags=["urls"]) if each.id == "idempotency.W010"]


class Transfers(IdempotentMixin, ModelActions):
    idempotent_operations = {
        "create": "urls.create",
        "update": Operation.declare("urls.update", **OUTSIDE),
        "destroy": "urls.destroy",
    }


class BySerializer(IdempotentMixin, Methods, generics.GenericAPIView):
    serializer_class = LabelSerializer
    idempotent_operations = {"put": "urls.put"}


class ByModel(CreateView):
    model = Transfer
    post = idempotent("urls.post")(PlainView.post)


router = SimpleRouter()
router.register("transfers", Transfers)
urlpatterns = [
    path("api/", include(router.urls)),
    path("serializer/", BySerializer.as_view()),
    path("model/", ByModel.as_view()),
    path("unknown/", MixinAPIView.as_view()),
    path("function/", plain_answer),
]


@pytest.mark.django_db  # Django's own checks query SQLite's features, once per process
def test_models_written_elsewhere_give_one_warning_for_each_database(settings):
    assert named() == []
    settings.DATABASE_ROUTERS = [TransfersElsewhere()]
    by_default, elsewhere = named()
    assert "records' database, 'default', but" in by_default
    of = "models are written to database 'elsewhere': 'urls.{}' of {} (testproject.Transfer)"
    assert f"{of.format('create', 'Transfers')}, 'urls.post' of ByModel (testproject.Transfer). " in by_default
    assert "records' database, 'records', but" in elsewhere
    assert f"{of.format('put', 'BySerializer')}. " in elsewhere


VIEWS = """
from idempotency import idempotent

@idempotent("late.keyless", profile="acp", key_required=False)
def keyless(request): ...

@idempotent("late.broken", account="no.such.function")
def broken(request): ...

urlpatterns = []
"""


@pytest.mark.parametrize(
    ("check", "expected"), [(check_profiles, "idempotency.W020"), (check_settings, "idempotency.E018")]
)
def test_a_check_finds_the_operations_of_views_not_imported_yet(settings, monkeypatch, tmp_path, check, expected):
    """Django runs checks in no fixed order, and one of Django's checks imports the URLconf."""
    name = f"late_urls_of_{expected[-4:]}"
    (tmp_path / f"{name}.py").write_text(VIEWS)
    monkeypatch.syspath_prepend(tmp_path)
    settings.ROOT_URLCONF = name
    assert expected in {message.id for message in check(None)}


def test_a_project_without_urls_has_nothing_to_check(settings):
    settings.DATABASE_ROUTERS = [TransfersElsewhere()]
    for forget in (lambda: setattr(settings, "ROOT_URLCONF", None), lambda: delattr(settings, "ROOT_URLCONF")):
        forget()
        assert check_models(None) == check_preconditions(None) == []


class Calling(HiddenView):
    """Gets no transaction, because the class detects the protected handler in its own body."""

    put = idempotent("urls.calling")(PlainView.post)


protected = idempotent("urls.function")(plain_answer)


class Proxy:
    """A transparent proxy, as tracers wrap around views with wrapt."""

    def __init__(self, view):
        self.__dict__["__wrapped__"] = view

    @property
    def __class__(self):
        return type(self.__wrapped__)

    def __getattr__(self, name):
        return getattr(self.__dict__["__wrapped__"], name)

    def __call__(self, request):
        return self.__wrapped__(request)


def unchanged(view):
    return view


def by_ninja(above=unchanged, below=unchanged):
    """The URLs of a protected route of Django Ninja, with a decorator above or below the protection."""
    api = pytest.importorskip("ninja").NinjaAPI(urls_namespace="checks")

    def change(request: HttpRequest) -> dict[str, str]: ...

    api.put("/thing")(above(idempotent("urls.ninja", methods=["PUT"])(below(change))))
    return api.urls


def exempted(urls):
    for pattern in urls[0]:
        transaction.non_atomic_requests(pattern.callback)
    return urls


#: What the hint for a method, a function and a route of Ninja begins with.
ON_THE_METHOD = "Put @idempotent above the other decorators of the method, or mark the view of the URL with"
ON_THE_FUNCTION = "Write @transaction.non_atomic_requests above all other decorators of the function, such as @api_view"
ON_EACH_PATTERN = "Mark the callback of each pattern of api.urls with"


def below_api_view():
    return api_view(["POST"])(permission_classes([])(idempotent("urls.below_api_view")(plain_answer)))


#: Views, and the hint if Django opens a transaction around them.
TRANSACTIONS = {
    "unprotected": (lambda: plain_answer, ""),
    "function": (lambda: protected, ""),
    "decorated": (lambda: csrf_exempt(never_cache(protected)), ""),
    "proxy": (lambda: Proxy(never_cache(protected)), ""),
    "class": (lambda: csrf_exempt(MethodView.as_view()), ""),
    "around": (lambda: idempotent("urls.around")(PlainView.as_view()), ""),
    "drf": (lambda: Transfers.as_view({"post": "create"}), ""),
    "hidden": (lambda: HiddenView.as_view(), ON_THE_METHOD),
    "exempted": (lambda: transaction.non_atomic_requests(HiddenView.as_view()), ""),
    "declared in the body": (lambda: Calling.as_view(), ""),
    "partial": (lambda: functools.partial(protected), ON_THE_FUNCTION),
    "below api_view": (below_api_view, ON_THE_FUNCTION),
    "below api_view, exempted": (lambda: transaction.non_atomic_requests(below_api_view()), ""),
    "ninja": (by_ninja, ON_EACH_PATTERN),
    "ninja exempted": (lambda: exempted(by_ninja()), ""),
}


@pytest.mark.failure_77
@pytest.mark.parametrize("kind", TRANSACTIONS)
def test_a_wrong_transaction_around_a_view_is_reported(kind, settings, atomic):
    view, hint = TRANSACTIONS[kind]
    now = idempotent("urls.now")(plain_answer)
    settings.ROOT_URLCONF = (path("api/", include([path("pay/", view())])), path("now/", now))
    found = check_atomic_requests(None)
    assert [message.id for message in found] == ["idempotency.E031"] * bool(hint and atomic)
    assert all("/api/pay/" in message.msg and message.hint.startswith(hint) for message in found)


class HiddenInAtomic(PlainView):
    """Its protection is hidden from the class."""

    post = method_decorator([transaction.atomic, never_cache])(idempotent("urls.in_atomic")(PlainView.post))


class HiddenExclusion(PlainView):
    post = method_decorator(never_cache)(idempotent("urls.excluded", methods=["PUT"])(PlainView.post))


@pytest.mark.parametrize(
    ("view", "mistake"),
    [
        (transaction.atomic(protected), "/: transaction.atomic is above Operation 'urls.function', where no claim"),
        (transaction.atomic(MethodView.as_view()), "transaction.atomic is above Operation 'kinds.method'"),
        (HiddenInAtomic.as_view(), "transaction.atomic is on HiddenInAtomic.post() above the protection"),
        (HiddenExclusion.as_view(), "Operation 'urls.excluded' protects nothing: HiddenExclusion.post, as routed"),
        (
            api_view(["PUT"])(idempotent("urls.drf_excluded", methods=["POST"])(plain_answer)),
            "Operation 'urls.drf_excluded' protects nothing: plain_answer() serves PUT",
        ),
        (csrf_exempt(protected), ""),
        (transaction.atomic(plain_answer), ""),
    ],
)
def test_a_route_that_refuses_every_request_is_an_error(settings, view, mistake):
    settings.ROOT_URLCONF = (path("", view),)
    found = check_declarations(None)
    assert [message.id for message in found] == ["idempotency.E033"] * bool(mistake)
    assert all(mistake in message.msg for message in found)
    for route in audit().routes:
        assert (str(route.verdict) == "broken") is (bool(mistake) and route.operation is not None)


def etag_of(request, **route):
    return '"1"'


async def protected_async(request): ...


def inner(view):
    def inner(request):
        return view(request)

    return inner


conditional = condition(etag_func=etag_of)


class ConditionOnDispatch(MethodView):
    dispatch = method_decorator(conditional)(MethodView.dispatch)


class ConditionOnMethod(PlainView):
    post = method_decorator([never_cache, etag(etag_of)])(idempotent("urls.precondition")(PlainView.post))


class ConditionBelow(PlainView):
    post = idempotent("urls.precondition_below")(method_decorator(conditional)(PlainView.post))


PRECONDITIONS = {
    "unprotected": (lambda: conditional(plain_answer), False),
    "function": (lambda: csrf_exempt(conditional(protected)), True),
    "async function": (lambda: conditional(idempotent("urls.async")(protected_async)), True),
    "last_modified": (lambda: last_modified(etag_of)(protected), True),
    "below": (lambda: idempotent("urls.below")(conditional(plain_answer)), False),
    "another decorator with the same name": (lambda: inner(protected), False),
    "around a class": (lambda: conditional(MethodView.as_view()), True),
    "dispatch": (lambda: ConditionOnDispatch.as_view(), True),
    "method": (lambda: ConditionOnMethod.as_view(), True),
    "below on a method": (lambda: ConditionBelow.as_view(), False),
    "drf": (lambda: conditional(Transfers.as_view({"post": "create"})), True),
    "drf without": (lambda: Transfers.as_view({"post": "create"}), False),
    "ninja": (lambda: by_ninja(above=import_module("ninja.decorators").decorate_view(conditional)), True),
    "below by ninja": (lambda: by_ninja(below=conditional), False),
}


@pytest.mark.failure_89
@pytest.mark.parametrize("kind", PRECONDITIONS)
def test_a_precondition_above_the_protection_is_reported(kind, settings):
    view, is_above = PRECONDITIONS[kind]
    settings.ROOT_URLCONF = (path("things/", view()),)
    assert [message.id for message in check_preconditions(None)] == ["idempotency.W025"] * is_above
    doubts = [reason for route in audit().routes for reason in route.reasons if "If-Match" in reason]
    assert bool(doubts) is is_above


class Table(PlainView):
    post = idempotent("urls.table")(PlainView.post)

    def dispatch(self, request, *args, **kwargs):
        return PlainView.post(self, request)


class Replaced(PlainView):
    post = idempotent("urls.replaced")(PlainView.post)

    def setup(self, request, *args, **kwargs):
        super().setup(request, *args, **kwargs)
        self.post = functools.partial(PlainView.post, self)


class Checking(PlainView):
    post = idempotent("urls.checking")(PlainView.post)

    @method_decorator(never_cache)
    def dispatch(self, request, *args, **kwargs):
        return super().dispatch(request, *args, **kwargs)


def test_a_way_around_the_protected_handler_is_doubtful(settings):
    views = (Table, Replaced, Checking)
    settings.ROOT_URLCONF = tuple(path(view.__name__, view.as_view()) for view in views)
    found = {route.route: route for route in audit().routes if route.method == "POST"}
    assert [found[f"/{view.__name__}"].verdict for view in views] == ["doubtful", "doubtful", "protected"]
    assert "test_checks_of_urls.Table.dispatch() finds its handler in another way" in found["/Table"].reasons[0]
    assert "test_checks_of_urls.Replaced.setup() assigns post of an instance" in found["/Replaced"].reasons[0]


@pytest.fixture
def without_adapter(monkeypatch):
    """Leaves out the adapter of a framework, as if its app were not installed."""

    def leave_out(framework, adapter):
        left = [each for each in adapter_module.adapters if each.__name__ != adapter]
        monkeypatch.setattr(adapter_module, "adapters", left)
        monkeypatch.setattr(decorators, "adapters", left)
        monkeypatch.delitem(sys.modules, f"idempotency.contrib.{framework}")

    return leave_out


def test_only_protected_routes_of_django_ninja_without_its_adapter_are_found(settings, without_adapter):
    ninja = pytest.importorskip("ninja")
    import_module("idempotency.contrib.ninja")
    settings.ROOT_URLCONF = (path("api/", by_ninja()),)
    assert check_ninja(None) == []
    without_adapter("ninja", "NinjaAdapter")
    settings.ROOT_URLCONF = (path("api/", by_ninja(above=csrf_exempt)),)
    (message,) = check_ninja(None)
    assert message.id == "idempotency.W026"
    assert "routes of 'urls.ninja' are" in message.msg
    unprotected = ninja.NinjaAPI(urls_namespace="unprotected")
    unprotected.put("/thing")(lambda request: None)
    settings.ROOT_URLCONF = (path("cms/", unprotected.urls), path("now/", protected))
    assert check_ninja(None) == []


def test_a_protection_above_a_route_of_django_ninja_is_refused_without_its_adapter(without_adapter):
    api = pytest.importorskip("ninja").NinjaAPI(urls_namespace="above")
    import_module("idempotency.contrib.ninja")
    without_adapter("ninja", "NinjaAdapter")
    with pytest.raises(ImproperlyConfigured, match="is above Ninja's decorator"):
        idempotent("urls.above_ninja")(api.post("/above")(lambda request: None))


def test_a_rest_framework_view_without_its_adapter_names_the_remedy(rf, without_adapter):
    without_adapter("rest_framework", "RestFrameworkAdapter")
    view = api_view(["POST"])(permission_classes([])(idempotent("urls.no_adapter")(plain_answer)))
    with pytest.raises(TypeError, match=r"Add 'rest_framework' to INSTALLED_APPS"):
        view(rf.post("/"))
