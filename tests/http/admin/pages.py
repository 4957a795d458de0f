"""Staff who log in to the admin, and what they see of a page."""

from __future__ import annotations

import re
from html import unescape

from django.contrib.auth.models import Permission, User
from django.http import HttpResponse
from django.test import Client

SECRET = "4242-4242-<b>"


def log_in(client: Client, *permissions: str, superuser: bool = False) -> None:
    user = User.objects.create_user("staff", is_staff=True, is_superuser=superuser)
    user.user_permissions.set(Permission.objects.filter(codename__in=permissions))
    client.force_login(user)


def text(response: HttpResponse) -> str:
    """What a person sees of a page."""
    assert response.status_code == 200
    return " ".join(unescape(re.sub(r"<[^>]*>", " ", response.content.decode())).split())
