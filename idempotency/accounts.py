"""Values of ``account``: they identify the caller that a key belongs to.

An account must follow from verified data, never from an unverified claim of the request. An account that names its kind
(``organisation=7``) can't be equal to an account of another kind.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass
from functools import lru_cache
from typing import Any
from urllib.parse import urlencode
from uuid import UUID

from django.apps import apps
from django.conf import settings as django_settings
from django.db.models import Model

from .options import validators

__all__ = [
    "FirstOf",
    "Fixed",
    "FromToken",
    "InTenant",
    "api_key",
    "authenticated_user",
]


def authenticated_user(request: Any) -> str | None:
    """The default of ``ACCOUNT``: the primary key of the authenticated user, or None.

    Users of two models may have the same primary key. So for a user that is not an ``AUTH_USER_MODEL``, the label of
    its model (or the name of its class) and a colon precede the primary key.
    """
    user = getattr(request, "user", None)
    if user is None or not user.is_authenticated or user.pk in {None, ""}:
        return None
    account = str(user.pk)
    kind: Any = user.__class__  # not type(), which would return SimpleLazyObject for request.user
    if not issubclass(kind, Model):
        return _fitted(f"{kind.__module__}.{kind.__qualname__}:{account}")
    model = kind._meta.concrete_model  # a proxy has the primary keys of its model
    # A user may have chosen a text primary key that looks like the account of a user of another model.
    if model is _user_model(django_settings.AUTH_USER_MODEL) and ":" not in account:
        return _fitted(account)
    return _fitted(f"{model._meta.label}:{account}")


@lru_cache
def _user_model(label: str) -> type[Model] | None:
    try:
        model: type[Model] | None = apps.get_model(label)._meta.concrete_model
    except LookupError:
        return None  # django.contrib.auth is not installed
    return model


@dataclass(frozen=True)
class Fixed:
    """The same account for every caller, such as the provider that sends a webhook.

    A decorator or permission above the view must verify the caller.

    :raises ValueError: the account is not 1 to 255 printable characters.
    """

    account: str

    def __post_init__(self) -> None:
        if problem := validators.name(self.account):
            raise ValueError(f"The account of Fixed() {problem}, not {self.account!r}.")

    def __call__(self, request: Any) -> str:
        return self.account


@dataclass(frozen=True, init=False)
class FirstOf:
    """The first account that a resolver finds, for example ``FirstOf(authenticated_user, api_key)`` for a view that
    accepts sessions, OAuth tokens and API keys. A renewed OAuth token is another ``api_key``, but the same user.

    :param resolvers: two or more functions that take the request and return an account or None. Two kinds of accounts
        must never have the same text.
    :raises ValueError: there are fewer than two.
    """

    resolvers: tuple[Callable[[Any], str | None], ...]

    def __init__(self, *resolvers: Callable[[Any], str | None]) -> None:
        if len(resolvers) < 2:
            raise ValueError("FirstOf() needs two resolvers or more.")
        object.__setattr__(self, "resolvers", resolvers)

    def __call__(self, request: Any) -> str | None:
        accounts = (resolve(request) for resolve in self.resolvers)
        return next((account for account in accounts if account is not None), None)


@dataclass(frozen=True, init=False)
class FromToken:
    """Claims of the token that authenticated the request: ``request.auth``, as JWT libraries set it.

    :param claims: their names: ``"sub"``, or ``"iss", "sub"`` if tokens have several issuers.
    """

    claims: tuple[str, ...]

    def __init__(self, *claims: str) -> None:
        if not claims:
            raise ValueError("FromToken() needs the name of a claim.")
        object.__setattr__(self, "claims", claims)

    def __call__(self, request: Any) -> str | None:
        token = getattr(request, "auth", None)
        payload = getattr(token, "payload", token)
        if not isinstance(payload, Mapping):
            return None
        values = {name: payload.get(name) for name in self.claims}
        if not all(isinstance(value, (str, int)) and value != "" for value in values.values()):
            return None
        return _fitted(urlencode(values, errors="surrogatepass"))  # JSON may hold what UTF-8 can't


@dataclass(frozen=True)
class InTenant:
    """The caller and the tenant for which the caller acts in this request.

    Without the tenant in the account, a key that was used in one organisation replays its outcome in another. The
    tenant may be unverified, because it is combined with the verified caller. Check above ``@idempotent`` whether the
    caller may still act for it, because a replay does not run the handler.

    :param account: the resolver of the caller; by default the resolver of the authenticated user.
    :param tenant: ``callable(request)`` that returns the tenant's identifier, or None.
    """

    account: Callable[[Any], str | None] = authenticated_user
    _: KW_ONLY
    tenant: Callable[[Any], object]

    def __call__(self, request: Any) -> str | None:
        account = self.account(request)
        if account is None:
            return None
        tenant = self.tenant(request)
        # Without a tenant, the handler uses a default or refuses.
        named = {"account": account} if tenant is None else {"account": account, "tenant": str(tenant)}
        return _fitted(urlencode(named, errors="surrogatepass"))


def api_key(request: Any) -> str | None:
    """The API key that authenticated the request: ``request.auth``. A new API key is a new account.

    The account of a model instance is its model and primary key. A string, or a primary key that is a string, may be
    the secret itself, so the account is its digest. Any other value gives None: True would be the same account for all
    callers, and an object's string may contain its memory address, which differs at each retry.
    """
    credential = getattr(request, "auth", None)
    if isinstance(credential, str) and credential:
        return f"key:{_digest(credential)}"
    if not isinstance(credential, Model) or credential.pk in {None, ""}:
        return None
    identity = credential.pk if isinstance(credential.pk, (int, UUID)) else _digest(credential.pk)
    return f"{credential._meta.label}:{identity}"


def _fitted(account: str) -> str:
    """The account, or its digest if a record can't hold it: an identity provider's subject may have 255 characters, and
    the forms here are longer. No account of another form starts like a digest."""
    return f"sha256:{_digest(account)}" if validators.name(account) else account


def _digest(secret: object) -> str:
    return hashlib.sha256(str(secret).encode("utf-8", "surrogatepass")).hexdigest()
