"""Who asks: the account of a record, and what is checked before every replay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from django.contrib.auth.base_user import AbstractBaseUser
from django.contrib.auth.decorators import permission_required
from django.contrib.auth.models import AnonymousUser, Permission, User
from django.http import HttpRequest
from django.utils.functional import SimpleLazyObject
from rest_framework.authentication import BaseAuthentication
from rest_framework.authtoken.models import Token
from rest_framework.decorators import api_view, permission_classes, throttle_classes
from rest_framework.exceptions import AuthenticationFailed
from rest_framework.permissions import BasePermission, IsAuthenticated
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.throttling import SimpleRateThrottle, UserRateThrottle
from rest_framework.views import APIView

from idempotency import idempotent
from idempotency.conf import authenticated_user
from idempotency.models import IdempotencyRecord
from testproject.views import ChargeViewSet
from tests.http.callers import Caller, assert_refused, effects, records, replayed
from tests.http.serving import Framework, Serve
from tests.http.views import drf_answer, plain_answer

# Who asks is decided before the database is asked. That it compares byte for byte: ``tests/unit/test_other_vendors``.
pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.once]


def deactivate(caller: Caller) -> None:
    User.objects.filter(pk=caller.user.pk).update(is_active=False)


def revoke_token(caller: Caller) -> None:
    Token.objects.all().delete()


@pytest.mark.scenario_21
@pytest.mark.parametrize("lock_out", [deactivate, revoke_token])
def test_who_is_locked_out_gets_no_stored_answer(alice: Caller, framework: Framework, lock_out: Any) -> None:
    framework.serve()
    first = alice.post(key="k")
    lock_out(alice)
    refused = alice.post(key="k")
    assert refused.status_code in {401, 403}
    assert first.content not in refused.content
    assert "Idempotency-Replayed" not in refused
    assert (effects(), records()) == (1, [("completed", 1)])


class MayTransfer(BasePermission):
    def has_permission(self, request: Any, view: Any) -> bool:
        return bool(request.user.has_perm("testproject.add_transfer"))


def transfers_of_a_viewset() -> Any:
    class Charges(ChargeViewSet):
        permission_classes = (IsAuthenticated, MayTransfer)

        def create(self, request: Request, *args: Any, **kwargs: Any) -> Response:
            return drf_answer(request)

    return Charges.as_view({"post": "create"})


@pytest.mark.failure_48
@pytest.mark.failure_50
@pytest.mark.parametrize(
    "view",
    [
        lambda: permission_required("testproject.add_transfer", raise_exception=True)(
            idempotent("tests.may")(plain_answer)
        ),
        lambda: api_view(["POST"])(permission_classes([MayTransfer])(idempotent("tests.may")(drf_answer))),
        transfers_of_a_viewset,
    ],
    ids=["plain", "drf", "mixin"],
)
def test_a_permission_is_checked_before_the_replay(alice: Caller, serve: Serve, view: Callable[[], Any]) -> None:
    serve(view())
    permission = Permission.objects.get(codename="add_transfer")
    assert alice.post(key="k").status_code == 403
    assert not IdempotencyRecord.objects.exists()  # what is refused before the claim is no outcome
    alice.user.user_permissions.add(permission)
    first, _ = replayed(alice)
    assert first.status_code == 201
    alice.user.user_permissions.remove(permission)
    refused = alice.post(key="k")
    assert refused.status_code == 403
    assert first.content not in refused.content
    alice.user.user_permissions.add(permission)
    assert alice.post(key="k").content == first.content


class TwiceAnHour(UserRateThrottle):
    rate = "2/hour"


@pytest.mark.failure_50
def test_a_429_of_a_throttle_is_not_stored_and_replays_are_throttled(alice: Caller, bob: Caller, serve: Serve) -> None:
    serve(api_view(["POST"])(throttle_classes([TwiceAnHour])(idempotent("tests.throttled")(drf_answer))))
    replayed(alice)
    refused = alice.post(key="k")
    assert refused.status_code == 429
    assert "Idempotency-Replayed" not in refused
    assert alice.post(key="k2").status_code == 429
    assert IdempotencyRecord.objects.count() == 1
    assert bob.post(key="k").status_code == 201
    assert effects() == 2


@pytest.mark.failure_86
def test_a_handler_that_throttles_itself_is_stopped(alice: Caller, serve: Serve) -> None:
    class Throttling(APIView):
        @idempotent("tests.throttling")
        def post(self, request: Request) -> Response:
            if effects() == 2:
                self.throttled(request, wait=60)
            return drf_answer(request)

    serve(Throttling.as_view())
    assert [alice.post(key=key).status_code for key in ("k1", "k2", "k3", "k3", "k1")] == [201, 201, 429, 429, 201]
    assert effects() == 2


@pytest.mark.failure_86
def test_a_throttle_before_authentication_bounds_the_passwords_that_are_checked(serve: Serve) -> None:
    checked: list[str] = []

    class Slow(SimpleRateThrottle):
        rate = "3/hour"

        def get_cache_key(self, request: Request, view: Any) -> str:
            return "passwords"

    class Password(BaseAuthentication):
        def authenticate(self, request: Request) -> Any:
            checked.append(request.META["HTTP_X_PASSWORD"])
            raise AuthenticationFailed

    class Guarded(APIView):
        throttle_classes = (Slow,)
        authentication_classes = (Password,)

        def initial(self, request: Request, *args: Any, **kwargs: Any) -> None:
            self.check_throttles(request)
            self.perform_authentication(request)

        @idempotent("tests.guarded")
        def post(self, request: Request) -> Response:
            raise AssertionError

    serve(Guarded.as_view())
    for password in "abcdefghijkl":
        Caller(None).post(key="k", headers={"X-Password": password})
    assert checked == ["a", "b", "c"]


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


@pytest.mark.failure_49
@pytest.mark.failure_66
@pytest.mark.parametrize(
    ("user", "account"),
    [
        (User(pk=7), "7"),
        (ProxyUser(pk=7), "7"),
        (Customer(pk=7), "shop.Customer:7"),
        (TokenUser(7), f"{__name__}.TokenUser:7"),
        # A primary key can't be chosen to look like another kind of user.
        (User(pk="shop.Customer:7"), "auth.User:shop.Customer:7"),
        (AnonymousUser(), None),
        (User(), None),
        (TokenUser(None), None),
    ],
    ids=["user", "proxy", "another model", "no model", "a chosen key", "anonymous", "unsaved", "no key"],
)
def test_two_kinds_of_user_never_share_an_account(user: Any, account: str | None) -> None:
    assert account_of(user) == account


@pytest.mark.failure_66
def test_without_a_user_or_a_user_model_there_is_no_account_or_one_that_says_its_kind(settings: Any) -> None:
    assert authenticated_user(HttpRequest()) is None
    settings.AUTH_USER_MODEL = "missing.User"
    assert account_of(User(pk=7)) == "auth.User:7"


def account_of_header(request: Any) -> str | None:
    return request.headers.get("X-Organisation")


@pytest.mark.failure_49
@pytest.mark.parametrize("by", ["policy", "setting", "dotted path"])
def test_a_resolver_says_the_account(alice: Caller, bob: Caller, framework: Framework, settings: Any, by: str) -> None:
    if by != "policy":
        settings.IDEMPOTENCY = {"ACCOUNT": account_of_header if by == "setting" else f"{__name__}.account_of_header"}
    framework.serve(**({"account": account_of_header} if by == "policy" else {}))
    first = alice.post(key="k", headers={"X-Organisation": "acme"})
    assert bob.post(key="k", headers={"X-Organisation": "acme"}).content == first.content
    assert bob.post(key="k", headers={"X-Organisation": "Acme"}).content != first.content
    assert_refused(alice, "idempotency_account_required", key="k")
    assert set(IdempotencyRecord.objects.values_list("account_id", flat=True)) == {"acme", "Acme"}
