"""Token authentication for Django REST framework and plain views."""

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
    """DRF's token authentication. Also rejects tokens that a database can't look up, for example with NUL."""

    def authenticate_credentials(self, key: str) -> tuple[Any, Any]:
        if not (key.isascii() and key.isalnum()):
            raise AuthenticationFailed("Invalid token.")
        credentials: tuple[Any, Any] = super().authenticate_credentials(key)
        return credentials


def token_required(view: Callable[..., Any]) -> Callable[..., Any]:
    """Set ``request.user`` from the caller's token, or return 401. For plain views, sync and async.

    Put it above ``@idempotent``, so that only a caller who may call the view gets a replay. The view is exempt from
    CSRF checks, because browsers don't send the Authorization header automatically.
    """

    @wraps(view)
    def authenticate(request: HttpRequest, *args: Any, **kwargs: Any) -> Any:
        return _authenticate(request) or view(request, *args, **kwargs)

    @wraps(view)
    async def authenticate_async(request: HttpRequest, *args: Any, **kwargs: Any) -> Any:
        return await sync_to_async(_authenticate)(request) or await view(request, *args, **kwargs)

    return csrf_exempt(authenticate_async if iscoroutinefunction(view) else authenticate)


def caller(request: HttpRequest) -> User:
    """The user that ``token_required`` authenticated."""
    if not request.user.is_authenticated:
        raise TypeError("caller() is for views under @token_required.")
    return request.user


def _authenticate(request: HttpRequest) -> JsonResponse | None:
    """Set ``request.user``, or return the 401 response."""
    scheme = TokenAuthentication()
    try:
        credentials = scheme.authenticate(cast(Request, request))  # only reads headers
    except AuthenticationFailed as error:
        detail = str(error.detail)
    else:
        if credentials is not None:
            request.user = credentials[0]
            return None
        detail = "Authentication credentials were not provided."
    return JsonResponse({"detail": detail}, status=401, headers={"WWW-Authenticate": scheme.keyword})
