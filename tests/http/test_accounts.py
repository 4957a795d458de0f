"""The account of a record, and the checks of the caller before every replay."""

from types import SimpleNamespace

import pytest
from django.contrib.auth.base_user import AbstractBaseUser
from django.contrib.auth.decorators import permission_required
from django.contrib.auth.models import AnonymousUser, Permission, User
from django.db import connection
from django.http import HttpRequest, JsonResponse
from django.urls import path
from django.utils.functional import SimpleLazyObject
from django.views.decorators.csrf import csrf_exempt
from rest_framework.authentication import BaseAuthentication
from rest_framework.authtoken.models import Token
from rest_framework.decorators import api_view, permission_classes
from rest_framework.permissions import BasePermission, IsAuthenticated
from rest_framework.views import APIView

from idempotency import claim, idempotent
from idempotency.accounts import (
    FirstOf,
    Fixed,
    FromToken,
    InTenant,
    api_key,
    authenticated_user,
)
from idempotency.keys import KeyStatusView
from idempotency.models import IdempotencyRecord
from tests.http.callers import effects, replayed
from tests.http.views import Methods, MixinViewSet, drf_answer, plain_answer, work

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.once]


def requested(**attributes):
    request = HttpRequest()
    vars(request).update(attributes)
    return request


SUB, BOTH = FromToken("sub"), FromToken("iss", "sub")


@pytest.mark.parametrize(
    ("resolver", "auth", "account"),
    [
        (SUB, {"sub": "7", "org": 3}, "sub=7"),
        (SUB, SimpleNamespace(payload={"sub": "a&sub=7"}), "sub=a%26sub%3D7"),
        (SUB, {"sub": "\ud800"}, "sub=%ED%A0%80"),
        *((SUB, auth, None) for auth in ({"sub": ""}, {"sub": ["7"]}, {}, "7", None)),
        (BOTH, {"iss": "a", "sub": 7}, "iss=a&sub=7"),
        (BOTH, {"sub": 7}, None),
        (Fixed("provider"), None, "provider"),
    ],
)
def test_from_token_uses_the_claims_and_fixed_is_shared(resolver, auth, account):
    assert resolver(requested(auth=auth)) == account


def test_two_resolvers_are_equal_if_they_read_the_same_claims():
    assert BOTH == FromToken("iss", "sub") != FromToken("sub", "iss")
    assert BOTH(requested()) is None
    with pytest.raises(ValueError, match="name of a claim"):
        FromToken()


def test_a_renewed_token_keeps_its_account_if_the_user_comes_first():
    first, renewed = (requested(auth=Token(key=key), user=User(pk=8)) for key in ("issued", "renewed"))
    assert api_key(first) != api_key(renewed)
    by_user = FirstOf(authenticated_user, api_key)
    assert by_user(first) == by_user(renewed) == "8"
    without_user = requested(auth=Token(key="issued"), user=AnonymousUser())
    assert by_user(without_user) == api_key(first)


def test_the_first_of_several_resolvers_names_the_account():
    mixed = FirstOf(api_key, authenticated_user)
    assert mixed(requested(auth=User(pk=7), user=User(pk=8))) == "auth.User:7"
    assert mixed(requested(user=User(pk=8))) == "8"
    assert mixed(requested(user=AnonymousUser())) is None
    assert mixed == FirstOf(api_key, authenticated_user) != FirstOf(authenticated_user, api_key)
    with pytest.raises(ValueError, match="two resolvers or more"):
        FirstOf(api_key)


def test_an_api_key_names_the_account_without_disclosing_the_secret():
    for unnamed in (None, {"sub": "7"}, True, "", object(), Token(), b"s3cret"):
        assert api_key(requested(auth=unnamed)) is None
    assert api_key(requested()) is None
    assert api_key(requested(auth=User(pk=7))) == "auth.User:7"  # any model
    for secret in ("s3cret", "s3cret\ud800", Token(key="s3cret")):
        account = api_key(requested(auth=secret))
        assert "s3cret" not in account
        assert account == api_key(requested(auth=secret))
    assert api_key(requested(auth="s3cret")) != api_key(requested(auth="another"))


LONG = ("s" * 254 + "1", "s" * 254 + "2", "ab+/" * 30, "ü" * 255, "a\n")


@pytest.mark.parametrize(
    "account_of",
    [
        lambda subject: SUB(requested(auth={"sub": subject})),
        lambda subject: BOTH(requested(auth={"iss": "https://login.example.com/v2.0", "sub": subject})),
        lambda subject: InTenant(tenant=lambda request: subject)(requested(user=User(pk=7))),
        lambda subject: InTenant(lambda request: subject, tenant=lambda request: "t")(requested()),
        lambda subject: authenticated_user(requested(user=TokenUser(subject))),
        lambda subject: authenticated_user(requested(user=User(pk=subject * 2))),
    ],
    ids=["subject", "issuer", "tenant", "caller", "user without a model", "text primary key"],
)
def test_an_identity_that_does_not_fit_is_recorded_as_its_digest(account_of):
    """An identity provider may use 255 characters, and the package's own form adds to them."""
    accounts = [account_of(subject) for subject in LONG]
    assert len(set(accounts)) == len(LONG)
    for account, again in zip(accounts, map(account_of, LONG), strict=True):
        assert account == again
        assert len(account) <= 255
        assert account.isprintable()
    assert accounts[0].startswith("sha256:")
    assert account_of("7") != account_of("sha256:7")
    assert not account_of("sha256:7").startswith("sha256:")  # so no caller can choose the digest of another


def test_an_unusable_account_is_the_resolvers_fault(alice, framework, serve, caplog):
    """The caller is authenticated, and can do nothing about it."""

    def account_of_shop(request):
        return accounts[0]

    accounts = ["", "a" * 256, "a\x00", "a\nb", "\ud800", 7, b"7"]
    view = framework.view(work, idempotent("accounts.unusable", account=account_of_shop))
    serve(view, **{"key/": KeyStatusView.as_view(operation="accounts.unusable")})
    answers = []
    with caplog.at_level("ERROR", "idempotency"):
        while accounts:
            answers += [alice.post(key="k"), alice.get("/key/", key="k")]
            accounts.pop(0)
    lines = [record.getMessage() for record in caplog.records if record.name == "idempotency"]
    for answer, line in zip(answers, lines, strict=True):
        assert (answer.status_code, answer.json()["code"]) == (500, "idempotency_account_invalid")
        assert "account_of_shop must be 1 to 255 printable characters" in line
        assert "'accounts.unusable'" in line
    assert not IdempotencyRecord.objects.exists()


def test_an_account_for_all_callers_is_checked_when_it_is_declared():
    with pytest.raises(ValueError, match="1 to 255 printable characters"):
        Fixed("")


def member_of(request):
    return request.META.get("HTTP_X_MEMBER_OF")


@pytest.mark.failure_96
def test_the_same_key_in_two_tenants_is_two_operations(alice, anonymous, framework):
    framework.serve(account=InTenant(tenant=member_of))

    def send(tenant, caller=alice):
        headers = {} if tenant is None else {"X-Member-Of": tenant}
        return caller.post(key="k", headers=headers)

    tenants = ("a", "b", "", "a&tenant=b", "ü", None)
    firsts = [send(tenant) for tenant in tenants]
    assert [answer["Idempotency-Status"] for answer in firsts] == ["executed"] * len(tenants)
    assert [send(tenant).content for tenant in tenants] == [answer.content for answer in firsts]
    assert effects() == len(tenants)
    accounts = set(IdempotencyRecord.objects.values_list("account_id", flat=True))
    assert {f"account={alice.user.pk}", f"account={alice.user.pk}&tenant=a"} <= accounts
    assert send("x" * 300)["Idempotency-Status"] == send("x" * 299 + "y")["Idempotency-Status"] == "executed"
    assert send("a", anonymous).status_code in {401, 403}


@pytest.mark.failure_96
def test_the_tenant_in_the_session_is_part_of_the_account():
    resolver = InTenant(lambda request: request.user, tenant=lambda request: request.session.get("organisation"))
    requests = [requested(user="7", session=session) for session in ({"organisation": 3}, {"organisation": 4}, {})]
    assert [resolver(request) for request in requests] == ["account=7&tenant=3", "account=7&tenant=4", "account=7"]
    assert resolver(requested(user=None, session={"organisation": 3})) is None


class MayTransfer(BasePermission):
    def has_permission(self, request, view):
        return bool(request.user.has_perm("testproject.add_transfer"))


@pytest.mark.scenario_21
@pytest.mark.failure_48
@pytest.mark.failure_50
@pytest.mark.parametrize(
    "view",
    [
        lambda: permission_required("testproject.add_transfer", raise_exception=True)(
            idempotent("tests.may")(plain_answer)
        ),
        lambda: api_view(["POST"])(permission_classes([MayTransfer])(idempotent("tests.may")(drf_answer))),
        lambda: MixinViewSet.as_view({"post": "create"}, permission_classes=[IsAuthenticated, MayTransfer]),
    ],
    ids=["plain", "drf", "mixin"],
)
def test_a_permission_is_checked_before_the_replay(alice, serve, view):
    serve(view())
    permission = Permission.objects.get(codename="add_transfer")
    assert alice.post(key="k").status_code == 403
    assert not IdempotencyRecord.objects.exists()  # a refusal before the claim is not recorded
    alice.user.user_permissions.add(permission)
    first, _ = replayed(alice)
    assert first.status_code == 201
    alice.user.user_permissions.remove(permission)
    refused = alice.post(key="k")
    assert (refused.status_code, first.content in refused.content) == (403, False)
    alice.user.user_permissions.add(permission)
    assert alice.post(key="k").content == first.content


@pytest.mark.failure_86
def test_a_throttle_before_authentication_limits_password_checks(anonymous, serve):
    checked = []

    class Password(BaseAuthentication):
        def authenticate(self, request):
            checked.append(request)

    class Guarded(APIView):
        authentication_classes = (Password,)
        post = idempotent("tests.guarded")(Methods.post)

        def initial(self, request, *args, **kwargs):
            self.throttled(request, wait=60)

    serve(Guarded.as_view())
    assert (anonymous.post(key="k").status_code, checked) == (429, [])


class Customer(AbstractBaseUser):
    """Another user model, which is never stored."""

    USERNAME_FIELD = "id"

    class Meta:
        app_label = "shop"
        managed = False


class ProxyUser(User):
    class Meta:
        app_label = "shop"
        proxy = True


class TokenUser:
    """A user without a model, as from a library for JSON Web Tokens."""

    is_authenticated = True

    def __init__(self, pk):
        self.pk = pk


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
def test_two_kinds_of_user_never_share_an_account(user, account, settings):
    assert authenticated_user(requested(user=SimpleLazyObject(lambda: user))) == account
    assert authenticated_user(requested()) is None
    settings.AUTH_USER_MODEL = "missing.User"
    assert authenticated_user(requested(user=User(pk=7))) == "auth.User:7"


def in_transaction(request):
    return JsonResponse({"in_transaction": connection.in_atomic_block})


async def asynchronous(request):
    return JsonResponse({"in_transaction": False})


def crashing(request):
    with claim("accounts.inner", account_id="1", key="no key"):
        raise AssertionError


OPEN = {name: idempotent(f"accounts.open_{name}", key_required=False) for name in ("plain", "async", "drf", "crash")}
OPEN_VIEWS = {
    "plain": OPEN["plain"](in_transaction),
    "async": OPEN["async"](asynchronous),
    "drf": api_view(["POST"])(permission_classes([])(OPEN["drf"](in_transaction))),
}


@pytest.mark.parametrize("kind", OPEN_VIEWS)
def test_without_an_account_an_optional_key_is_ignored(anonymous, settings, kind, atomic):
    if atomic and kind == "async":
        pytest.skip("Django refuses async views with ATOMIC_REQUESTS")
    settings.ROOT_URLCONF = (path("", csrf_exempt(OPEN_VIEWS[kind])),)
    for _ in range(2):
        answer = anonymous.post(key="k")
        assert (answer.status_code, answer["Idempotency-Status"]) == (200, "ignored")
        assert answer.json()["in_transaction"] == atomic
        assert not {"Idempotency-Key", "Idempotency-Retention", "Idempotency-Replayed"} & {*answer.headers}
    assert IdempotencyRecord.objects.count() == 0


def test_an_ignored_key_leaves_the_views_error_unchanged(anonymous, settings, middleware):
    settings.ROOT_URLCONF = (path("", csrf_exempt(OPEN["crash"](crashing))),)
    answer = anonymous.post(key="k")
    assert (answer.status_code, answer.json()["code"]) == (400, "idempotency_key_invalid")
