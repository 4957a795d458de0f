"""Log staff in to the admin, read its pages, send its forms, and make records to show."""

import re
from html import unescape

from django.contrib.auth.models import Permission, User
from django.urls import reverse

from idempotency.lifecycle import Status
from idempotency.operation import Operation
from tests.records import HOUR, make_records

SECRET = "4242-4242-<b>"
#: Values for the form that records an outcome.
OUTCOME = {"status": "201", "content_type": "application/json", "body": '{"id": 7}', "reason": "asked the bank"}


def log_in(client, *permissions, superuser=False):
    user = User.objects.create_user("staff", is_staff=True, is_superuser=superuser)
    user.user_permissions.set(Permission.objects.filter(codename__in=permissions))
    client.force_login(user)
    return client


def text(response):
    assert response.status_code == 200
    return plain_text(response.content.decode())


def plain_text(shown):
    return " ".join(unescape(re.sub(r"<[^>]*>", " ", str(shown))).split())


def hidden_fields(page):
    """The hidden fields of a page's form: lists of values by name."""
    fields = {}
    for name, value in re.findall(r'<input type="hidden" name="([^"]*)" value="([^"]*)">', page.content.decode()):
        fields.setdefault(name, []).append(unescape(value))
    return fields


def messages_on(response):
    return [str(message) for message in response.context["messages"]]


LIST = reverse("admin:idempotency_idempotencyrecord_changelist")
MESSAGES = reverse("admin:idempotency_outbox_outboxmessage_changelist")
DASHBOARD = reverse("admin:idempotency_dashboard")


def choose(client, action, *pks, url=LIST):
    return client.post(url, {"action": action, "_selected_action": pks})


def decide(client, page, url=LIST, **values):
    """Send a page's form as a browser does. Returns the messages that are shown then."""
    response = client.post(url, {**hidden_fields(page), **values}, follow=True)
    assert response.status_code == 200
    return messages_on(response)


def listed(client, url=LIST, **query):
    page = client.get(url, query)
    assert page.status_code == 200, page
    return list(page.context["cl"].result_list)


charges = Operation.declare("tests.admin.charges")
refunds = Operation.declare("tests.admin.refunds")


def detail(pk, view="change", model="idempotencyrecord"):
    app = {"idempotencyrecord": "idempotency", "outboxmessage": "idempotency_outbox"}[model]
    return reverse(f"admin:{app}_{model}_{view}", args=[pk])


def record(status=Status.PARKED, operation=charges.name, **fields):
    (pk,) = make_records(1, status, **{"expires": HOUR, "operation": operation} | fields)
    return pk


def secret_record(**fields):
    (pk,) = make_records(
        response_headers=[["Link", SECRET], ["Link", "second"]],
        response_body=f'{{"card": "{SECRET}"}}',
        response_reference=f"reference {SECRET}",
        error=f"ValueError: {SECRET}",
        **fields,
    )
    return pk
