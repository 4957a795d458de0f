"""Who asks: the account of a record, and what is checked before every replay."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
from django.contrib.auth.base_user import AbstractBaseUser
from django.contrib.auth.decorators import login_required, permission_required
from django.contrib.auth.models import AnonymousUser, Permission, User
from django.http import HttpRequest, HttpResponse
from django.test import Client
from django.urls import path
from django.utils.functional import SimpleLazyObject
from django.views.decorators.csrf import csrf_exempt
from rest_framework.authentication import SessionAuthentication
from rest_framework.authtoken.models import Token
from rest_framework.decorators import api_view, authentication_classes, permission_classes, throttle_classes
from rest_framework.permissions import BasePermission, IsAuthenticated
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.throttling import UserRateThrottle

from idempotency import Operation, current_claim, idempotent
from idempotency.conf import authenticated_user
from idempotency.lifecycle import Status
from idempotency.models import IdempotencyRecord
from testproject.authentication import token_required
from testproject.models import Charge, Transfer
from testproject.views import ChargeViewSet
from tests.factories import UserFactory
from tests.http.callers import Caller, Serve, effects, problem_code
from tests.http.views import drf_answer, plain_answer, work

pytestmark = pytest.mark.django_db(transaction=True)


def deactivate(caller: Caller) -> None:
    assert caller.user is not None
    caller.user.is_active = False
    caller.user.save()


# 21 and failure mode 48


@pytest.mark.scenario(21)
def test_a_deactivated_users_retry_gets_no_stored_answer(alice: Caller, serve_operation: Callable[..., None]) -> None:
    serve_operation()
    first = alice.post(key="k")
    deactivate(alice)
    refused = alice.post(key="k")
    assert refused.status_code in {401, 403}
    assert first.content not in refused.content
    assert "Idempotency-Replayed" not in refused
    assert effects() == 1
    assert IdempotencyRecord.objects.get().status == Status.COMPLETED


@pytest.mark.scenario(21)
def test_a_revoked_token_gets_no_stored_answer(alice: Caller, serve_operation: Callable[..., None]) -> None:
    serve_operation()
    alice.post(key="k")
    Token.objects.all().delete()
    assert alice.post(key="k").status_code == 401
    assert effects() == 1


@pytest.mark.scenario(21)
def test_a_rotated_token_is_the_same_account(alice: Caller, serve_operation: Callable[..., None]) -> None:
    serve_operation()
    first = alice.post(key="k")
    Token.objects.all().delete()
    alice.token = Token.objects.create(user=alice.user)
    replay = alice.post(key="k")
    assert replay.content == first.content
    assert replay["Idempotency-Replayed"] == "true"
    assert effects() == 1


class MayTransfer(BasePermission):
    def has_permission(self, request: Any, view: Any) -> bool:
        return bool(request.user.has_perm("testproject.add_transfer"))


@pytest.mark.failure_mode(48)
@pytest.mark.parametrize("framework", ["plain", "drf", "mixin"])
def test_a_permission_is_checked_before_the_replay(alice: Caller, serve: Serve, framework: str) -> None:
    if framework == "plain":
        serve(
            permission_required("testproject.add_transfer", raise_exception=True)(idempotent("tests.may")(plain_answer))
        )
    elif framework == "drf":
        serve(api_view(["POST"])(permission_classes([MayTransfer])(idempotent("tests.may")(drf_answer))))
    else:

        class Charges(ChargeViewSet):
            permission_classes = (IsAuthenticated, MayTransfer)

            def create(self, request: Request, *args: Any, **kwargs: Any) -> Response:
                return drf_answer(request)

        serve(Charges.as_view({"post": "create"}))
    assert alice.user is not None
    permission = Permission.objects.get(codename="add_transfer")
    alice.user.user_permissions.add(permission)
    first = alice.post(key="k")
    assert first.status_code == 201
    alice.user.user_permissions.remove(permission)
    refused = alice.post(key="k")
    assert refused.status_code == 403
    assert first.content not in refused.content
    alice.user.user_permissions.add(permission)
    assert alice.post(key="k").content == first.content
    assert effects() == 1


@pytest.mark.failure_mode(48)
def test_a_refusal_before_the_claim_is_no_outcome(alice: Caller, serve: Serve) -> None:
    """Failure mode 50 as well: a 403 raised before the claim is never stored."""
    serve(permission_required("testproject.add_transfer", raise_exception=True)(idempotent("tests.may")(plain_answer)))
    assert alice.post(key="k").status_code == 403
    assert not IdempotencyRecord.objects.exists()
    assert alice.user is not None
    alice.user.user_permissions.add(Permission.objects.get(codename="add_transfer"))
    assert alice.post(key="k").status_code == 201
    assert effects() == 1


# Failure mode 50


@pytest.mark.failure_mode(50)
def test_a_401_is_never_stored(alice: Caller, serve_operation: Callable[..., None]) -> None:
    serve_operation()
    token, alice.token = alice.token, None
    assert alice.post(key="k").status_code == 401
    assert not IdempotencyRecord.objects.exists()
    alice.token = token
    assert alice.post(key="k").status_code == 201
    assert effects() == 1


class TwiceAnHour(UserRateThrottle):
    rate = "2/hour"


@pytest.mark.failure_mode(50)
def test_a_429_of_a_throttle_is_never_stored_and_replays_are_throttled(
    alice: Caller, bob: Caller, serve: Serve
) -> None:
    serve(api_view(["POST"])(throttle_classes([TwiceAnHour])(idempotent("tests.throttled")(drf_answer))))
    first = alice.post(key="k")
    assert alice.post(key="k").content == first.content
    refused = alice.post(key="k")
    assert refused.status_code == 429
    assert "Idempotency-Replayed" not in refused
    assert alice.post(key="k2").status_code == 429
    assert IdempotencyRecord.objects.count() == 1
    assert bob.post(key="k").status_code == 201
    assert effects() == 2


# Failure mode 49


@pytest.mark.failure_mode(49)
@pytest.mark.parametrize("framework", ["plain", "drf"])
def test_session_users_have_scopes_of_their_own_and_the_anonymous_none(settings: Any, framework: str) -> None:
    protected = idempotent("tests.session")(plain_answer if framework == "plain" else drf_answer)
    settings.ROOT_URLCONF = (
        path(
            "",
            protected
            if framework == "plain"
            else api_view(["POST"])(authentication_classes([SessionAuthentication])(protected)),
        ),
    )
    answers = []
    for user in (UserFactory(), UserFactory()):
        client = Client()
        client.force_login(user)
        of_user = [
            client.post("/", {}, content_type="application/json", headers={"Idempotency-Key": "k"}) for _ in range(2)
        ]
        assert of_user[0].status_code == 201
        assert of_user[1].content == of_user[0].content
        assert of_user[1]["Idempotency-Replayed"] == "true"
        answers.append(of_user[0].content)
    assert answers[0] != answers[1]
    assert effects() == 2
    refused = Client().post("/", {}, content_type="application/json", headers={"Idempotency-Key": "k"})
    assert refused.status_code in {401, 403}
    assert effects() == 2


@pytest.mark.failure_mode(49)
def test_login_required_stands_before_the_replay(settings: Any) -> None:
    settings.ROOT_URLCONF = (path("", login_required(idempotent("tests.session")(plain_answer))),)
    client = Client()
    client.force_login(UserFactory())
    assert client.post("/", headers={"Idempotency-Key": "k"}).status_code == 201
    client.logout()
    assert client.post("/", headers={"Idempotency-Key": "k"}).status_code == 302
    assert effects() == 1


@pytest.mark.failure_mode(49)
@pytest.mark.parametrize("first_by", ["session", "token"])
def test_session_and_token_of_one_user_are_one_account(alice: Caller, settings: Any, first_by: str) -> None:
    protected = idempotent("tests.either")(plain_answer)
    settings.ROOT_URLCONF = (
        path("session/", protected, name="either"),
        path("token/", token_required(protected), name="either"),
    )
    assert alice.user is not None
    by_session = Client()
    by_session.force_login(alice.user)
    sent = {"content_type": "application/json", "headers": {"Idempotency-Key": "k"}}
    requests = [lambda: by_session.post("/session/", {}, **sent), lambda: alice.post("/token/", {}, key="k")]
    if first_by == "token":
        requests.reverse()
    first, replay = (request() for request in requests)
    assert replay.content == first.content
    assert replay["Idempotency-Replayed"] == "true"
    assert effects() == 1


# Failure mode 66


class Customer(AbstractBaseUser):
    """A second kind of user, which is never stored."""

    USERNAME_FIELD = "id"

    class Meta:
        app_label = "shop"
        managed = False


class ProxyUser(User):
    class Meta:
        app_label = "shop"
        proxy = True


class TokenUser:
    """A user of a token alone, as of a library for JSON Web Tokens."""

    is_authenticated = True

    def __init__(self, pk: Any) -> None:
        self.pk = pk


def account_of(user: Any) -> str | None:
    request = HttpRequest()
    request.user = SimpleLazyObject(lambda: user)  # type: ignore[assignment]
    return authenticated_user(request)


@pytest.mark.failure_mode(66)
def test_two_kinds_of_user_never_share_an_account() -> None:
    accounts = [account_of(user) for user in (User(pk=7), Customer(pk=7), TokenUser(7))]
    assert accounts == ["7", "shop.Customer:7", f"{__name__}.TokenUser:7"]


@pytest.mark.failure_mode(66)
def test_a_proxy_of_the_user_model_is_the_same_user() -> None:
    assert account_of(ProxyUser(pk=7)) == "7"


@pytest.mark.failure_mode(66)
def test_a_primary_key_can_not_be_chosen_to_look_like_another_kind_of_user() -> None:
    assert account_of(User(pk="shop.Customer:7")) == "auth.User:shop.Customer:7"


@pytest.mark.failure_mode(66)
def test_without_a_user_model_every_account_says_its_kind(settings: Any) -> None:
    settings.AUTH_USER_MODEL = "missing.User"
    assert account_of(User(pk=7)) == "auth.User:7"


@pytest.mark.failure_mode(49)
@pytest.mark.parametrize("user", [AnonymousUser(), User(), TokenUser(None)])
def test_who_has_no_primary_key_has_no_account(user: Any) -> None:
    assert account_of(user) is None
    assert authenticated_user(HttpRequest()) is None


@pytest.mark.failure_mode(66)
def test_another_kind_of_user_is_not_answered_with_the_first_ones_response(settings: Any) -> None:
    operation = Operation("tests.kinds_of_user")

    def as_kind(user: Any, answer: str) -> Any:
        @idempotent(operation)
        def view(request: HttpRequest) -> HttpResponse:
            return HttpResponse(answer)

        def authenticated(request: HttpRequest) -> Any:
            request.user = user
            return view(request)

        return csrf_exempt(authenticated)

    settings.ROOT_URLCONF = (path("", as_kind(User(pk=7), "users")), path("shop/", as_kind(Customer(pk=7), "shop's")))
    sent = {"content_type": "application/json", "headers": {"Idempotency-Key": "k"}}
    assert [Client().post(url, {}, **sent).content for url in ("/", "/shop/")] == [b"users", b"shop's"]


# The account resolver


def account_of_header(request: Any) -> str | None:
    account: str | None = request.headers.get("X-Organisation")
    return account


@pytest.mark.failure_mode(49)
@pytest.mark.parametrize("by", ["policy", "setting", "dotted path"])
def test_the_account_is_what_the_resolver_says(
    alice: Caller, bob: Caller, serve_operation: Callable[..., None], settings: Any, by: str
) -> None:
    if by == "policy":
        serve_operation(account=account_of_header)
    else:
        settings.IDEMPOTENCY = {"ACCOUNT": account_of_header if by == "setting" else f"{__name__}.account_of_header"}
        serve_operation()
    first = alice.post(key="k", headers={"X-Organisation": "acme"})
    assert bob.post(key="k", headers={"X-Organisation": "acme"}).content == first.content
    assert bob.post(key="k", headers={"X-Organisation": "Acme"}).content != first.content
    refused = alice.post(key="k")
    assert refused.status_code == 401
    assert problem_code(refused) == "idempotency_account_required"
    assert effects() == 2
    assert set(IdempotencyRecord.objects.values_list("account_id", flat=True)) == {"acme", "Acme"}


@pytest.mark.failure_mode(46)
def test_the_account_is_never_taken_from_the_body(
    alice: Caller, bob: Caller, serve_operation: Callable[..., None]
) -> None:
    serve_operation()
    assert alice.user is not None
    payload = {"account_id": alice.user.pk, "user": "alice"}
    first = alice.post(data=payload, key="k")
    assert bob.post(data=payload, key="k").content != first.content
    assert effects() == 2


@pytest.mark.failure_mode(46)
def test_a_shared_object_answers_each_caller_for_himself(alice: Caller, bob: Caller, settings: Any) -> None:
    """Object permissions are the handler's; a replay is only ever the caller's own."""

    class Charges(ChargeViewSet):
        idempotent_operations: ClassVar = {"capture": "tests.capture"}

        def capture(self, request: Request, pk: str) -> Response:
            charge = self.get_object()
            work(request)
            return Response({"captured": charge.pk})

    settings.ROOT_URLCONF = (path("charges/<str:pk>/capture/", Charges.as_view({"post": "capture"})),)
    charge = Charge.objects.create(account=alice.user, amount=1, currency="usd")
    url = f"/charges/{charge.pk}/capture/"
    assert alice.post(url, key="k").status_code == 200
    for _ in range(2):
        refused = bob.post(url, key="k")
        assert refused.status_code == 404
        assert str(charge.pk) not in json.loads(refused.content).get("detail", "")
    assert effects() == 1
    assert Transfer.objects.get().account == alice.user


@pytest.mark.failure_mode(48)
def test_a_view_sees_the_user_of_this_request_in_a_rebuild(alice: Caller, serve: Serve) -> None:
    def rebuild(reference: str, request: HttpRequest) -> HttpResponse:
        return HttpResponse(f"{reference} for {request.user}")

    @idempotent("tests.rebuild", rebuild=rebuild)
    def view(request: HttpRequest) -> HttpResponse:
        claim = current_claim()
        assert claim is not None
        claim.reference = "report"
        work(request)
        return HttpResponse(f"report for {request.user}")

    serve(view)
    assert alice.post(key="k").content == alice.post(key="k").content == b"report for alice"
    assert effects() == 1
