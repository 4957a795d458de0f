"""No form and no query gives a page of the admin a server error. ``--count`` is how many are sent."""

from collections import Counter
from urllib.parse import urlencode

import pytest
from django.urls import reverse
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from idempotency.admin import decisions
from idempotency.lifecycle import Status
from idempotency.outbox.models import MessageStatus
from tests.http.admin.pages import LIST, charges, log_in
from tests.http.callers import FORM
from tests.outbox import make_messages
from tests.records import make_records
from tests.results import note

pytestmark = pytest.mark.django_db

DASHBOARD = reverse("admin:idempotency_dashboard")
MESSAGES = reverse("admin:idempotency_outbox_outboxmessage_changelist")
ACTIONS = ["release", "record_outcome", "mark_not_executed", "requeue", "delete_selected", "no such action"]
NAMES = ["action", "_selected_action", "index", "select_across", "decided", "seen", "reason", "status", "content_type"]
NAMES += ["body", "q", "p", "o", "e", "state", "operation", "idempotency_key", "account_id", "_popup"]
ROW = ["PK", "PK:1:parked", "PK:1:dead", "PK:0:", "yes"]

texts = st.sampled_from([*ACTIONS, *ROW, "a\0b", "9" * 30, "9" * 5_000, "\u0663", "x" * 256]) | st.text(max_size=20)
several = st.lists(texts, max_size=3)
fields = st.dictionaries(st.sampled_from(NAMES) | st.text(max_size=8), several, max_size=6)
decisions_sent = st.fixed_dictionaries({}, optional=dict.fromkeys(["_selected_action", "seen", "decided"], several))


def send_anything(client, count):
    """What each page answers to random forms and queries."""
    operator = log_in(client, superuser=True)
    operator.raise_request_exception = False
    answered = Counter()

    @hypothesis_settings(max_examples=count or 100, deadline=None, suppress_health_check=list(HealthCheck))
    @given(
        url=st.sampled_from([LIST, MESSAGES, DASHBOARD]),
        form=decisions_sent | fields,
        query=fields,
        action=st.sampled_from(ACTIONS),
    )
    def send(url, form, query, action):
        dead = url == MESSAGES
        pk, *_ = (
            make_messages(1, MessageStatus.DEAD) if dead else make_records(1, Status.PARKED, operation=charges.name)
        )
        page = f"{url}?{urlencode(query, doseq=True, errors='replace')}"
        sent = urlencode({"action": action, "_selected_action": "PK", **form}, doseq=True, errors="replace")
        posted = operator.post(page, sent.replace("PK", str(pk)), content_type=FORM, follow=True)
        for answer in (posted, operator.get(page, follow=True)):
            answered[answer.status_code] += 1
            assert answer.status_code < 500

    send()
    return answered


def test_no_form_and_no_query_gives_a_server_error(client, count):
    answered = send_anything(client, count)
    assert {200, 400} <= answered.keys()
    note("fuzz: admin", requests=answered.total(), answers=dict(answered), violations=0)


def test_an_action_that_trusts_its_form_is_found(client, monkeypatch):
    monkeypatch.setattr(decisions, "parse_number", int)
    with pytest.raises(AssertionError):
        send_anything(client, None)
