"""Authentication by a token in the Authorization header, for Django REST framework and for plain views."""

from collections.abc import Callable
from functools import wraps
from typing import Any, cast

from asgiref.sync import iscoroutinefunction, sync_to_async
from django.contrib.auth.models import User
from django.http import HttpRequest, JsonResponse
from django.views.decorators.csrf import csrf_exempt
from rest_framework import authentication
from rest_framework.exceptions import AuthenticationFailed
from rest_framework.request import Request


class TokenAuthentication(authentication.TokenAuthentication):
    """REST framework's authentication. It also refuses tokens that a database can't look up, such as one with NUL."""

    def authenticate_credentials(self, key: str) -> tuple[Any, Any]:
        if not (key.isascii() and key.isalnum()):
            raise AuthenticationFailed("Invalid token.")
        credentials: tuple[Any, Any] = super().authenticate_credentials(key)
        return credentials


def token_required(view: Callable[..., Any]) -> Callable[..., Any]:
    """Set ``request.user`` from the caller's token, or answer 401. For plain views, sync and async.

    Put it above ``@idempotent``, because a caller who may not call the view may not see a replay either. The view needs
    no CSRF token, because a browser doesn't send this header by itself.
    """

    @wraps(view)
    def authenticate(request: HttpRequest, *args: Any, **kwargs: Any) -> Any:
        return _authenticate(request) or view(request, *args, **kwargs)

    @wraps(view)
    async def authenticate_async(request: HttpRequest, *args: Any, **kwargs: Any) -> Any:
        return await sync_to_async(_authenticate)(request) or await view(request, *args, **kwargs)

    return csrf_exempt(authenticate_async if iscoroutinefunction(view) else authenticate)


def caller(request: HttpRequest) -> User:
    """The user that ``token_required`` has found."""
    if not request.user.is_authenticated:
        raise TypeError("caller() is for views under @token_required.")
    return request.user


def _authenticate(request: HttpRequest) -> JsonResponse | None:
    """Set ``request.user``, or return the refusal."""
    scheme = TokenAuthentication()
    try:
        credentials = scheme.authenticate(cast(Request, request))  # it only reads the headers
    except AuthenticationFailed as error:
        detail = str(error.detail)
    else:
        if credentials is not None:
            request.user = credentials[0]
            return None
        detail = "Authentication credentials were not provided."
    return JsonResponse({"detail": detail}, status=401, headers={"WWW-Authenticate": scheme.keyword})
