"""Staff who log in to the admin, what they see of a page, and records to show on it."""

from __future__ import annotations

import re
from html import unescape
from typing import Any

from django.contrib.auth.models import Permission, User
from django.http import HttpResponse
from django.test import Client
from django.urls import reverse

from idempotency.operation import Operation
from tests.records import make_records

SECRET = "4242-4242-<b>"


def log_in(client: Client, *permissions: str, superuser: bool = False) -> Client:
    user = User.objects.create_user("staff", is_staff=True, is_superuser=superuser)
    user.user_permissions.set(Permission.objects.filter(codename__in=permissions))
    client.force_login(user)
    return client


def text(response: HttpResponse) -> str:
    assert response.status_code == 200
    return told(response.content.decode())


def told(shown: object) -> str:
    return " ".join(unescape(re.sub(r"<[^>]*>", " ", str(shown))).split())


def hidden_fields(page: HttpResponse) -> dict[str, list[str]]:
    """What the form of a page sends besides what a person enters."""
    fields: dict[str, list[str]] = {}
    for name, value in re.findall(r'<input type="hidden" name="([^"]*)" value="([^"]*)">', page.content.decode()):
        fields.setdefault(name, []).append(unescape(value))
    return fields


def said(response: Any) -> list[str]:
    return [str(message) for message in response.context["messages"]]


# Lists, of records if nothing else is said

LIST = reverse("admin:idempotency_idempotencyrecord_changelist")


def ask(client: Client, action: str, *pks: int, url: str = LIST) -> Any:
    return client.post(url, {"action": action, "_selected_action": pks})


def decide(client: Client, page: HttpResponse, url: str = LIST, **values: Any) -> list[str]:
    """Send the form of a page as a browser does: what is said then."""
    response = client.post(url, {**hidden_fields(page), **values}, follow=True)
    assert response.status_code == 200
    return said(response)


def listed(client: Client, url: str = LIST, **query: str) -> list[Any]:
    page = client.get(url, query)
    assert page.status_code == 200, page
    return list(page.context["cl"].result_list)


# Records

charges = Operation("tests.admin.charges")
refunds = Operation("tests.admin.refunds")


def detail(pk: object, view: str = "change", model: str = "idempotencyrecord") -> str:
    app = {"idempotencyrecord": "idempotency", "outboxmessage": "idempotency_outbox"}[model]
    return reverse(f"admin:{app}_{model}_{view}", args=[pk])


def secret_record(**fields: Any) -> int:
    (pk,) = make_records(
        response_headers=[["Link", SECRET], ["Link", "second"]],
        response_body=f'{{"card": "{SECRET}"}}',
        response_reference=f"reference {SECRET}",
        error=f"ValueError: {SECRET}",
        **fields,
    )
    return pk
