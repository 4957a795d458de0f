"""Handlers of class-based views: any position of the mixin among the bases, any wrapper above a protected handler."""

import functools
import json

import pytest
from django.db import connection, transaction
from django.http import HttpRequest, JsonResponse
from django.urls import path, re_path
from django.utils.decorators import method_decorator
from django.views import View
from django.views.decorators.cache import never_cache
from rest_framework.views import APIView

from idempotency import idempotent
from idempotency.contrib.rest_framework import IdempotentMixin
from idempotency.models import IdempotencyRecord
from tests.http.callers import effects, problem_code
from tests.http.serving import WAYS, Calling, Creating, Declaring, EveryMethod, protecting, refused, runs_once, served
from tests.http.views import AsyncView, MethodAPIView, Methods, MethodView, async_answer, drf_answer, plain_answer

# Whether a method is protected is decided before the database is queried.
pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.failure_62, pytest.mark.once]


class CallsByItself:
    """A project's base class that calls its handlers itself, for example to log or to catch their errors."""

    def initial(self, request, *args, **kwargs):
        self.perform_authentication(request)

    def dispatch(self, request, *args, **kwargs):
        self.headers = {}
        self.args, self.kwargs = args, kwargs
        self.request = request = self.initialize_request(request, *args, **kwargs)
        self.initial(request, *args, **kwargs)
        response = getattr(self, request.method.lower())(request, *args, **kwargs)
        return self.finalize_response(request, response, *args, **kwargs)


BASES = {
    "first": (Declaring, Methods, APIView),
    "last": (Methods, APIView, Declaring),
    "behind a dispatch() of the project": (CallsByItself, Declaring, Methods, APIView),
    "decorated": (Creating, APIView),
    "of a plain view": (Declaring, EveryMethod, View),
}


@pytest.mark.parametrize("bases", BASES.values(), ids=BASES)
def test_the_mixin_protects_at_any_position_among_the_bases(alice, serve, bases, atomic):
    view = type("Mixed", bases, {})
    serve(view.as_view())
    assert runs_once(alice, "POST")
    # An unprotected method keeps its transaction.
    assert alice.request("PUT", "/?crash=1").status_code == 500
    assert effects() == (1 if atomic else 2)


@pytest.mark.parametrize("way", ["inherited", "decorated below its protection", "wrapped by the project"])
def test_an_async_handler_is_protected(alice, serve, transport, way):
    decorated = method_decorator(never_cache)(AsyncView.post)
    decorated.__qualname__ = "Decorated.post"
    view = type("Mixed", (Declaring, AsyncView), {})
    if way == "decorated below its protection":
        view = type("Decorated", (View,), {"post": idempotent("tests.decorated")(decorated)})
    if way == "wrapped by the project":

        class Wrapped(AsyncView):
            post = idempotent("tests.wrapped")(AsyncView.post)

            @classmethod
            def as_view(cls):
                async def wrapped(request):
                    return await called(request)

                called = super().as_view()
                return wrapped

        view = Wrapped
    serve(view.as_view())
    assert view.view_is_async
    assert runs_once(alice, "POST")


async def awaiting(self, request, number):
    return await async_answer(request)


@pytest.mark.parametrize("handler", [lambda self, request, number: plain_answer(request), awaiting])
def test_an_inherited_handler_gets_its_url_arguments(alice, serve, handler):
    serve(**{"<int:number>/": type("Mixed", (Declaring, type("Base", (View,), {"post": handler})), {}).as_view()})
    assert runs_once(alice, "POST", "/7/")


def test_a_handler_of_a_mixin_between_the_bases_is_called(alice, serve):
    class Noting(Methods):
        def post(self, request):
            noted.append(type(self).__name__)
            return super().post(request)

    noted = []
    both = type("Both", (type("Protected", (Declaring, Methods, APIView), {}), Noting), {})
    serve(both.as_view())
    assert runs_once(alice, "POST")
    assert noted == ["Both"]


def test_a_subclass_may_assign_a_mixin_handler_to_another_operation(alice, serve):
    class First(Declaring, Methods, APIView):
        pass

    class Second(First):
        idempotent_operations = {"post": "tests.second"}

    class Third(Second):
        def post(self, request):
            return super().post(request)

    serve(First.as_view(), **{"second/": Second.as_view(), "third/": Third.as_view()})
    assert all(runs_once(alice, "POST", url) for url in ("/", "/second/", "/third/"))
    names = IdempotencyRecord.objects.order_by("pk").values_list("operation", flat=True)
    assert list(names) == ["tests.declaring", "tests.second", "tests.second"]


each_base = pytest.mark.parametrize("base", [MethodView, MethodAPIView])


def copied(base):
    answer = drf_answer if issubclass(base, APIView) else plain_answer

    @functools.wraps(base.post)
    def post(self, request):
        return answer(request)

    return post


@pytest.mark.failure_77
@each_base
@pytest.mark.parametrize(
    "decorate",
    [
        lambda post: post,
        method_decorator(never_cache),
        lambda post: functools.update_wrapper(Calling(post), post.__wrapped__),
    ],
    ids=["copied", "decorated", "object"],
)
def test_copied_attributes_of_a_protected_handler_protect_nothing(alice, serve, atomic, base, decorate):
    """Such a handler keeps the transaction of ATOMIC_REQUESTS."""
    view = type("Overriding", (base,), {"post": decorate(copied(base))})
    serve(view.as_view())
    for _ in range(2):
        answer = alice.post(key="k")
        assert (answer.status_code, "Idempotency-Key" in answer) == (201, False)
        assert json.loads(answer.content)["in_transaction"] == atomic
    assert effects() == 2
    assert alice.post("/?crash=1", key="k").status_code == 500
    assert effects() == (2 if atomic else 3)


@pytest.mark.failure_77
@each_base
def test_a_copy_of_a_handlers_attributes_is_refused_below_a_protection(base):
    namespace = {"post": copied(base), "idempotent_operations": {"post": "tests.again"}}
    with refused("above tests.http.test_class_handlers.copied"):
        type("Overriding", (IdempotentMixin, base), namespace)


def in_body(base):
    """Decorate as a class body may, so that the class can't detect the protected handler."""

    def post(self, request):
        return (plain_answer if isinstance(request, HttpRequest) else drf_answer)(request)

    post.__qualname__ = "Body.post"
    return method_decorator(never_cache)(idempotent("tests.body")(post))


def custom(handler):
    empty = None

    def timed(*args):
        return handler(*args) if args else empty  # noqa: F821

    @functools.wraps(handler)
    def call(*args):
        return timed(*args) if args else call()

    del empty  # leaves an empty closure cell before the handler's, like a variable that is assigned later
    return call


ABOVE = {
    "override": lambda base: lambda self, request: base.post(self, request),
    "inherited": lambda base: method_decorator(never_cache)(base.post),
    "custom": lambda base: custom(base.post),
    "object": lambda base: Calling(base.post),
    "partial": lambda base: functools.partialmethod(base.post),
    "other": in_body,
}


@each_base
@pytest.mark.parametrize("above", ABOVE.values(), ids=ABOVE)
@pytest.mark.usefixtures("atomic")
def test_a_handler_that_calls_a_protected_one_is_protected(alice, serve, base, above):
    serve(type("Overriding", (base,), {"post": above(base)}).as_view())
    assert runs_once(alice, "POST")
    assert alice.post("/?crash=1", key="crash").status_code == 500
    assert effects() == 1


def test_a_decorator_that_answers_itself_keeps_its_transaction(alice, serve, atomic):
    def gate(handler):
        @functools.wraps(handler)
        def post(self, request):
            return plain_answer(request) if "other" in request.GET else handler(self, request)

        return post

    serve(type("Gated", (MethodView,), {"post": gate(MethodView.post)}).as_view())
    assert runs_once(alice, "POST")
    assert alice.post("/?other=1&crash=1", key="k").status_code == 500
    assert effects() == (1 if atomic else 2)


def test_a_handler_gets_the_arguments_of_its_route(alice, settings, atomic):
    class Echo(View):
        def get(self, request, *args, **kwargs):
            return JsonResponse([args, kwargs], safe=False)

        post = idempotent("tests.echo")(get)

    view = served(Echo.as_view())
    settings.ROOT_URLCONF = (re_path("^([0-9]+)/$", view), path("orders/<int:pk>/", view))
    for url, expected in (("/7/", [["7"], {}]), ("/orders/7/", [[], {"pk": 7}])):
        assert alice.post(url, key=url).json() == alice.get(url).json() == expected


@pytest.mark.usefixtures("atomic_requests")
def test_writes_above_a_protected_handler_are_committed_before_its_claim(alice, serve):
    class Writing(MethodView):
        def post(self, request):
            plain_answer(request)
            if "inside" in request.GET:
                with transaction.atomic():
                    return super().post(request)
            answer = super().post(request)
            assert not connection.in_atomic_block
            if "after" in request.GET:
                raise ZeroDivisionError
            return answer

    serve(Writing.as_view())
    assert (alice.post(key="k").status_code, effects()) == (201, 2)
    assert (alice.post(key="k")["Idempotency-Replayed"], effects()) == ("true", 3)
    assert (alice.post("/?after=1", key="after").status_code, effects()) == (500, 5)
    assert problem_code(alice.post("/?inside=1", key="inside")) == "idempotency_outer_transaction"


class ByKeyword:
    def put(self, request):
        return self.post(request=request)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("bases", [(Methods, APIView), (EveryMethod, View)], ids=["drf", "plain"])
def test_a_protected_handler_may_be_called_by_keyword(alice, serve, way, bases):
    base = type("Called", (ByKeyword, *bases), {})
    serve(protecting(way, base, {"post": "tests.by_keyword"}).as_view())
    assert runs_once(alice, "PUT")


def test_without_a_url_the_request_is_not_a_route_argument(rf, async_rf):
    """The request's text differs if the retry arrives over ASGI."""

    @idempotent("tests.without_a_url", account=lambda request: "1")
    def view(request, number):
        return JsonResponse({"number": number})

    answers = [view(request=each.post("/", headers={"Idempotency-Key": "k"}), number=1) for each in (rf, async_rf)]
    assert [answer.get("Idempotency-Replayed") for answer in answers] == [None, "true"]
