"""A DRF view's object permissions are checked before a replay too, and leave no writes."""

import pytest
from django.contrib.auth.models import User
from django.db import InterfaceError, OperationalError, connection, connections
from django.db.backends.signals import connection_created
from django.http import Http404
from django.shortcuts import get_object_or_404
from django.test.utils import CaptureQueriesContext
from rest_framework import exceptions, viewsets
from rest_framework.decorators import action
from rest_framework.generics import GenericAPIView
from rest_framework.permissions import BasePermission, IsAuthenticated
from rest_framework.response import Response
from rest_framework.routers import SimpleRouter
from rest_framework.views import APIView, exception_handler

from idempotency import idempotent
from idempotency.contrib.rest_framework import IdempotentMixin
from idempotency.exceptions import InProgressError
from testproject.models import Transfer
from tests.aliases import added
from tests.http.callers import replayed
from tests.http.views import CrashError, LabelSerializer

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.failure_66]


class IsOwner(BasePermission):
    def has_object_permission(self, request, view, obj):
        return bool(obj.account == request.user)


class Transfers(IdempotentMixin, viewsets.ModelViewSet):
    queryset = Transfer.objects.all()
    serializer_class = LabelSerializer
    permission_classes = [IsAuthenticated & IsOwner]
    idempotent_operations = {name: f"objects.{name}" for name in ("partial_update", "destroy", "lock", "count")}

    @action(detail=True, methods=["post"])
    def lock(self, request, pk):
        return Response({"label": self.get_object().label})

    @action(detail=False, methods=["post"])
    def count(self, request):
        return Response({"count": Transfer.objects.count()})

    def get_queryset(self):
        return Transfer.objects.select_for_update() if self.action == "lock" else super().get_queryset()


@pytest.fixture
def transfer(alice, settings):
    router = SimpleRouter()
    router.register("transfers", Transfers)
    settings.ROOT_URLCONF = tuple(router.urls)
    return Transfer.objects.create(account=alice.user, recipient="carol", amount=1, label="mine")


def assert_refusal(answer, status):
    """The response is the check's refusal, without the outcome."""
    assert (answer.status_code, b"mine" in answer.content, b"changed" in answer.content) == (status, False, False)
    assert "Idempotency-Replayed" not in answer
    assert (answer["Idempotency-Status"], answer["Idempotency-Key"]) == ("recorded", "k")


def assert_replayed(answer, first):
    assert (answer.status_code, answer.content) == (first.status_code, first.content)
    assert (answer["Idempotency-Replayed"], answer["Idempotency-Status"]) == ("true", "replayed")


def test_a_caller_that_lost_access_to_the_object_gets_no_replay(alice, bob, transfer):
    sent = {"method": "PATCH", "url": f"/transfers/{transfer.pk}/", "data": {"label": "changed"}, "key": "k"}
    assert [bob.request(**sent).status_code for _ in range(2)] == [403, 403]  # not bob's object
    transfer.refresh_from_db()
    assert transfer.label == "mine"
    first, _ = replayed(alice, wrote=0, **sent)
    assert first.status_code == 200
    Transfer.objects.update(account=bob.user)
    assert_refusal(alice.request(**sent), 403)
    Transfer.objects.update(account=alice.user)
    assert_replayed(alice.request(**sent), first)


def test_a_204_is_replayed_although_the_operation_deleted_its_object(alice, transfer):
    first, replay = replayed(alice, f"/transfers/{transfer.pk}/", method="DELETE", wrote=-1)
    assert first.status_code == 204
    assert_replayed(replay, first)


@pytest.mark.except_sqlite
def test_the_views_query_may_lock_the_row(alice, bob, transfer):
    answers = [alice.post(f"/transfers/{transfer.pk}/lock/", key="k") for _ in range(2)]
    assert answers[1]["Idempotency-Replayed"] == "true"
    Transfer.objects.update(account=bob.user)
    assert alice.post(f"/transfers/{transfer.pk}/lock/", key="k").status_code == 403


def test_a_check_that_connects_again_begins_once(alice, transfer, monkeypatch):
    def get_object(view):
        connection_created.send(type(connection), connection=connection)
        return GenericAPIView.get_object(view)

    monkeypatch.setattr(Transfers, "get_object", get_object)
    url = f"/transfers/{transfer.pk}/"
    first, _ = replayed(alice, url, method="PATCH", data={"label": "changed"}, key="k", wrote=0)
    assert first.status_code == 200


def queries_of_transfers(send):
    with CaptureQueriesContext(connection) as queries:
        assert send()["Idempotency-Replayed"] == "true"
    return [query for query in queries.captured_queries if Transfer._meta.db_table in query["sql"]]


def test_a_route_without_an_object_queries_none_before_a_replay(alice, transfer):
    alice.post("/transfers/count/", key="k")
    assert queries_of_transfers(lambda: alice.post("/transfers/count/", key="k")) == []


class Base(GenericAPIView):
    """A view whose handler looks up its object and returns the label."""

    queryset = Transfer.objects.all()
    permission_classes = [IsAuthenticated]

    def handle(self, request, **route):
        return Response({"label": self.get_object(**self.passed()).label})

    def passed(self):
        return {}


@pytest.fixture
def lookup(alice, serve):
    """Serve a view with these members and make the first request for alice's transfer. Returns its retry."""

    def lookup(base=Base, route="<int:pk>/", method="PATCH", **members):
        handler = idempotent("objects.looked_up", methods=(method,))(base.handle)
        serve(**{route: type("View", (base,), {method.lower(): handler, **members}).as_view()})
        transfer = Transfer.objects.create(account=alice.user, recipient="carol", amount=1, label="mine")
        url = f"/{route}".replace("<int:pk>", str(transfer.pk)).replace("<str:name>", "mine")
        assert alice.request(method, url, key="k").content == b'{"label":"mine"}'
        return lambda: alice.request(method, url, key="k")

    return lookup


class Hiding(BasePermission):
    """Refuses as DRF's DjangoObjectPermissions do."""

    def has_object_permission(self, request, view, obj):
        if obj.account != request.user:
            raise Http404
        return True


class Querying(BasePermission):
    def has_object_permission(self, request, view, obj):
        return bool(get_object_or_404(Transfer, pk=obj.pk, account=request.user))


class UnpaidError(exceptions.APIException):
    status_code = 402


def check_by_402(view, request, obj):
    if obj.account != request.user:
        raise UnpaidError


def get_or_403(view):
    found = get_object_or_404(Transfer, pk=view.kwargs["pk"])
    if found.account != view.request.user:
        raise exceptions.PermissionDenied
    return found


class RefusedError(Exception):
    """An error that the project's exception handler handles."""


def handle_refused(error, context):
    """An exception handler of a project that handles every error itself."""
    if isinstance(error, RefusedError):
        return Response(status=409)
    return exception_handler(error, context) or Response(status=500)


def get_or_409(view):
    found = get_object_or_404(Transfer, pk=view.kwargs["pk"])
    if found.account != view.request.user:
        raise RefusedError
    return found


def get_as_member(view):
    """Refuses because another object is missing."""
    found = get_object_or_404(Transfer, pk=view.kwargs["pk"])
    get_object_or_404(User.objects.filter(pk=view.request.user.pk), pk=found.account_id)
    return found


def hide_403(view):
    try:
        return get_or_403(view)
    except exceptions.PermissionDenied:
        raise exceptions.NotFound from None


CHECKS = {
    "a permission's 404": ({"permission_classes": [Hiding]}, 404),
    "a permission's query": ({"permission_classes": [Querying]}, 404),
    "the view's own check": ({"check_object_permissions": check_by_402}, 402),
    "its own lookup, 403": ({"get_object": get_or_403}, 403),
    "the project's error": ({"get_object": get_or_409, "get_exception_handler": lambda view: handle_refused}, 409),
    "another object's lookup": ({"get_object": get_as_member}, 404),
    "a 403 behind a 404": ({"get_object": hide_403}, 404),
    "another name in the URL": (
        {"permission_classes": [IsOwner], "lookup_field": "label", "lookup_url_kwarg": "name"},
        403,
    ),
}


@pytest.mark.parametrize(("members", "status"), CHECKS.values(), ids=CHECKS)
@pytest.mark.failure_90
def test_any_status_of_a_check_and_a_missing_object_refuse_a_replay(lookup, alice, bob, members, status):
    send = lookup(route="mine/<str:name>/" if "lookup_url_kwarg" in members else "<int:pk>/", **members)
    first = send()
    assert_replayed(first, first)
    Transfer.objects.update(account=bob.user)
    assert_refusal(send(), status)
    Transfer.objects.update(account=alice.user)
    assert_replayed(send(), first)
    Transfer.objects.all().delete()
    assert_refusal(send(), 404)


def test_a_view_that_cannot_refuse_an_object_queries_none_before_a_replay(lookup):
    assert queries_of_transfers(lookup()) == []


def own(view):
    return Transfer.objects.filter(account=view.request.user)


class OwnOnly:
    """A filter backend that finds only the caller's objects."""

    def filter_queryset(self, request, queryset, view):
        return queryset.filter(account=request.user)


HIDING = {
    "get_queryset": {"get_queryset": own, "queryset": None},
    "get_queryset beside a queryset": {"get_queryset": own},
    "filter_queryset": {"filter_queryset": lambda view, queryset: queryset.filter(account=view.request.user)},
    "a filter backend": {"filter_backends": [OwnOnly]},
    "get": {"get_object": lambda view: own(view).get(), "queryset": None},
}


@pytest.mark.parametrize("members", HIDING.values(), ids=HIDING)
@pytest.mark.failure_90
def test_an_object_that_the_view_hides_from_the_caller_is_refused(lookup, bob, members):
    send = lookup(**members)
    first = send()
    assert_replayed(first, first)
    Transfer.objects.update(account=bob.user)
    assert_refusal(send(), 404)


def test_a_deletion_that_answered_with_a_body_is_refused(lookup):
    def handle(view, request, **route):
        answer = Base.handle(view, request)
        Transfer.objects.all().delete()
        return answer

    send = lookup(type("Deleting", (Base,), {"handle": handle}), method="DELETE", get_queryset=own)
    assert_refusal(send(), 404)


class Closing(viewsets.GenericViewSet):
    """Its handler looks up no object, so the view declares no queryset."""

    permission_classes = [IsAuthenticated & IsOwner]

    @idempotent("objects.close")
    def close(self, request, pk):
        return Response({"closed": pk})


def test_an_outcome_without_an_object_is_replayed(alice, serve):
    def get_object(view):
        if not view.kwargs["pk"].isdigit():
            raise Http404
        return Transfer.objects.get(pk=view.kwargs["pk"])

    members = {"post": idempotent("objects.none")(Base.handle)}
    serve(
        **{
            "own/<str:pk>/": type("Own", (Base,), {**members, "get_object": get_object}).as_view(),
            "drf/<str:pk>/": type("View", (Base,), {**members, "permission_classes": [IsOwner]}).as_view(),
            "<int:pk>/": Closing.as_view({"post": "close"}),
        }
    )
    for url, status in {"/own/x/": 404, "/drf/x/": 404, "/1/": 200}.items():
        first, replay = replayed(alice, url, wrote=0, key=url)
        assert (first.status_code, replay["Idempotency-Status"]) == (status, "replayed")


class Tutorial(APIView):
    """A view whose lookup takes a URL argument, as in DRF's tutorial."""

    permission_classes = [IsOwner]
    handle = Base.handle

    def get_object(self, pk, *, deep=False):
        found = get_object_or_404(Transfer, pk=pk)
        self.check_object_permissions(self.request, found)
        return found

    def passed(self):
        return {"pk": self.kwargs["pk"]}


def test_a_lookup_may_take_the_arguments_of_the_url(lookup, bob):
    send = lookup(Tutorial)
    first = send()
    assert_replayed(first, first)
    Transfer.objects.update(account=bob.user)
    assert_refusal(send(), 403)
    Transfer.objects.all().delete()
    assert_refusal(send(), 404)


def test_a_lookup_with_an_argument_missing_from_the_url_is_skipped(lookup, bob):
    send = lookup(Tutorial, route="mine/", passed=lambda view: {"pk": Transfer.objects.get().pk})
    first = send()
    Transfer.objects.update(account=bob.user)
    assert_replayed(send(), first)


def get_only_own(view):
    if (found := Transfer.objects.get()).account != view.request.user:
        raise exceptions.PermissionDenied
    return found


@pytest.mark.parametrize(
    ("method", "members", "is_checked"),
    [
        ("PATCH", {}, True),
        ("POST", {}, False),  # it may create the object, so there is none to look up
        ("POST", {"detail": True}, True),
        ("PATCH", {"detail": False}, False),
    ],
)
def test_an_object_without_a_url_argument_is_found_by_the_view(lookup, bob, method, members, is_checked):
    send = lookup(route="mine/", method=method, get_object=get_only_own, **members)
    first = send()
    Transfer.objects.update(account=bob.user)
    if is_checked:
        assert_refusal(send(), 403)
    else:
        assert_replayed(send(), first)


def raising(error):
    def raise_it():
        raise error

    return raise_it


#: What the log must name, the failing call, and the Retry-After.
ERRORS = {
    "MultipleObjectsReturned": (raising(Transfer.MultipleObjectsReturned()), None),
    "CrashError": (raising(CrashError()), None),
    "APIException": (raising(exceptions.APIException()), None),
    "InProgressError": (raising(InProgressError(retry_after=7)), None),
    "lock not available": (raising(OperationalError("lock not available")), "1"),
    "InterfaceError": (raising(InterfaceError("connection already closed")), "1"),
    "no_such_table": (lambda: connection.cursor().execute("SELECT * FROM no_such_table"), None),
}


@pytest.mark.parametrize("handler", [exception_handler, handle_refused])
@pytest.mark.parametrize("named", ERRORS)
def test_a_check_that_cannot_be_made_is_answered_with_503(lookup, caplog, named, handler):
    fail, retry_after = ERRORS[named]

    def get_object(view):
        for fail in failing:
            fail()
        return Transfer.objects.get()

    failing = []
    send = lookup(get_object=get_object, get_exception_handler=lambda view: handler)
    first = send()
    failing.append(fail)
    refused = send()
    assert_refusal(refused, 503)
    assert (refused.json()["code"], refused.get("Retry-After")) == ("idempotency_unavailable", retry_after)
    assert named in caplog.text
    failing.clear()
    assert_replayed(send(), first)


@pytest.mark.parametrize("refuses", [False, True])
@pytest.mark.usefixtures("atomic")
def test_the_writes_of_a_check_are_rolled_back(lookup, alice, refuses):
    def check(view, request, obj):
        User.objects.create(username=f"seen-{len(checks)}")
        checks.append(obj)
        if len(checks) == 2 and refuses:
            raise exceptions.PermissionDenied

    checks = []
    send = lookup(check_object_permissions=check)
    assert send().status_code == (403 if refuses else 200)
    assert len(checks) == 2
    assert not User.objects.filter(username="seen-1").exists()
    assert User.objects.filter(username="seen-0").exists()  # written by the first execution


@pytest.mark.parametrize("connected", [False, True])
def test_what_a_check_writes_to_another_database_is_rolled_back(lookup, monkeypatch, tmp_path, connected):
    """Django closes connections between requests, so a check may be the first to use a database."""

    def check(view, request, obj):
        with connections["logs"].cursor() as cursor:
            cursor.execute("INSERT INTO seen DEFAULT VALUES")

    def rows():
        with connections["logs"].cursor() as cursor:
            cursor.execute("SELECT count(*) FROM seen")
            return cursor.fetchone()[0]

    settings = {**connections.settings["default"], "ENGINE": "django.db.backends.sqlite3", "OPTIONS": {}}
    with added(monkeypatch, "logs", {**settings, "NAME": str(tmp_path / "logs.sqlite3")}):
        with connections["logs"].cursor() as cursor:
            cursor.execute("CREATE TABLE seen (id integer PRIMARY KEY)")
        send = lookup(check_object_permissions=check)
        if not connected:
            connections["logs"].close()
        assert send()["Idempotency-Replayed"] == "true"
        assert (rows(), connections["logs"].in_atomic_block) == (1, False)  # written by the first execution
