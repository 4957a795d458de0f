"""Ready resolvers of accounts: what the server has verified, and nothing that a request merely says."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from django.contrib.auth.models import AnonymousUser, User
from django.contrib.sessions.backends.db import SessionStore
from django.core.checks import run_checks
from django.http import HttpRequest, HttpResponse
from django.urls import path
from django.views.decorators.csrf import csrf_exempt
from rest_framework.authtoken.models import Token

from idempotency import Operation, idempotent
from idempotency.http.accounts import Fixed, FromRoute, FromToken, api_key, remember_visitor, user_or_visitor
from testproject.authentication import token_required
from tests.http.callers import Caller, assert_refused, replayed
from tests.http.views import plain_answer

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.once]


def plain_answer_with_route(request: HttpRequest, **route: Any) -> HttpResponse:
    return plain_answer(request)


def requested(**attributes: Any) -> Any:
    request = HttpRequest()
    vars(request).update(attributes)
    return request


@pytest.mark.parametrize(
    ("auth", "account"),
    [
        ({"sub": "7", "org": 3}, "sub=7"),
        (SimpleNamespace(payload={"sub": "a&sub=7"}), "sub=a%26sub%3D7"),
        ({"sub": "\ud800"}, "sub=%ED%A0%80"),
        ({"sub": ""}, None),
        ({"sub": ["7"]}, None),
        ({}, None),
        ("7", None),
        (None, None),
    ],
)
def test_a_token_names_the_account_by_its_claim(auth: Any, account: str | None) -> None:
    assert FromToken("sub")(requested(auth=auth)) == account


def test_the_claims_of_a_token_stay_apart() -> None:
    both = FromToken("iss", "sub")
    assert both(requested(auth={"iss": "a", "sub": 7})) == "iss=a&sub=7"
    assert both(requested(auth={"sub": 7})) is None
    assert both == FromToken("iss", "sub") != FromToken("sub", "iss")
    with pytest.raises(ValueError, match="name of a claim"):
        FromToken()


def test_an_api_key_is_an_account_and_no_secret_becomes_one() -> None:
    for nobody in (None, {"sub": "7"}, True, "", object(), Token(), b"s3cret"):
        assert api_key(requested(auth=nobody)) is None
    assert api_key(requested()) is None
    assert api_key(requested(auth=User(pk=7))) == "auth.User:7"  # whatever model it is
    for secret in ("s3cret", Token(key="s3cret")):
        account = api_key(requested(auth=secret))
        assert account is not None
        assert "s3cret" not in account
        assert account == api_key(requested(auth=secret))


def test_an_argument_of_the_url_is_an_account_if_the_caller_may_act_for_it(
    alice: Caller, bob: Caller, settings: Any
) -> None:
    def acts_for(request: Any, organisation: int) -> bool:
        return bool(request.user.pk == alice.user.pk and organisation == 3)

    protect = idempotent("accounts.route", account=FromRoute("organisation", acts_for))
    view = csrf_exempt(token_required(protect(plain_answer_with_route)))
    settings.ROOT_URLCONF = (path("<int:organisation>/", view), path("none/", view))
    assert FromRoute("organisation", acts_for)(requested()) is FromRoute("organisation", acts_for)(object()) is None
    replayed(alice, "/3/")
    for caller, url in ((bob, "/3/"), (alice, "/4/"), (alice, "/none/")):
        assert_refused(caller, "idempotency_account_required", url, key="k")


def test_a_visitor_is_an_account_from_the_time_a_form_is_shown() -> None:
    session = SessionStore()
    request = requested(user=AnonymousUser(), session=session)
    assert user_or_visitor(request) is None
    remember_visitor(request)
    account = user_or_visitor(request)
    session.cycle_key()
    remember_visitor(request)
    assert account == user_or_visitor(request)
    assert account is not None
    assert account.startswith("visitor:")
    assert session.session_key not in account
    session.flush()
    assert user_or_visitor(request) is user_or_visitor(requested(user=AnonymousUser())) is None
    assert user_or_visitor(requested(user=User(pk=7), session=session)) == "7"


def test_a_fixed_account_is_everybodys() -> None:
    assert Fixed("provider")(requested()) == "provider"


def test_a_check_says_what_an_anonymous_account_means(settings: Any) -> None:
    def found() -> list[Any]:
        return [message for message in run_checks() if message.id == "idempotency.W011"]

    assert found() == []
    Operation("accounts.visitors", account="idempotency.http.accounts.user_or_visitor")
    Operation("accounts.broken", account="no.such.function")
    (warning,) = found()
    assert "'accounts.visitors'" in warning.msg
    assert "another account" in warning.msg
    settings.IDEMPOTENCY = {"TTL": 3}  # the operations can't be read then
    assert found() == []
