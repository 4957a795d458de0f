"""The documentation's examples run and have the described effects."""

import hmac
import json
import re
import sys
from types import ModuleType, SimpleNamespace
from uuid import uuid4

import django
import httpx
import pytest
from django.contrib.auth.models import AnonymousUser, User
from django.db import connection
from django.db.models.functions import Now
from django.test import Client, RequestFactory, override_settings
from django.urls import path
from rest_framework.test import force_authenticate

import idempotency
from idempotency import extensions, signals
from idempotency.checks import check_databases
from idempotency.http.key_headers import RETENTION_HEADER, STATUS_HEADER
from idempotency.http.problems import PROFILES
from idempotency.identity import keys
from idempotency.lifecycle import Status
from idempotency.models import IdempotencyRecord, IdempotencyStep
from idempotency.options.values import IETF
from idempotency.outbox import publish
from idempotency.outbox.models import OutboxMessage
from testproject.models import Charge, Export, Notification, Payout, Transfer
from tests.docs.conftest import post, repeat_in_every_way, twice
from tests.docs.pages import PAGES, blocks, text_of
from tests.docs.servers import cut
from tests.factories import ChargeFactory, UserFactory
from tests.operations import receiving
from tests.records import HOUR, make_records, purge_body_of
from tests.tables import create_without_constraints, drop, drop_field, whole_tables  # noqa: F401 - a fixture

# Other tests run the features of the examples on each database.
pytestmark = [pytest.mark.django_db, pytest.mark.once]


@pytest.mark.parametrize("name", [name for name in PAGES if not name.startswith("tutorial/")])
def test_every_example_runs(name, run_page):
    run_page(name)


def test_the_job_is_started_once_and_its_duplicates_attach(run_page):
    view, user = run_page("how-to/start-a-job.md")["create_export"], UserFactory()
    running = [post(view, {"label": "march"}, user=user) for _ in range(2)]
    export = Export.objects.get()
    assert [(answer.status_code, answer["Location"]) for answer in running] == [(202, f"/exports/{export.pk}/")] * 2
    assert OutboxMessage.objects.get().topic == "shop.tasks.run_export"
    Export.objects.update(finished_at=Now(), charges=3)
    ended = post(view, {"label": "march"}, user=user)
    assert (ended.status_code, ended["Idempotency-Replayed"], json.loads(ended.content)["charges"]) == (200, "true", 3)


@pytest.mark.failure_103
@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("name", ["README.md", "index.md", "how-to/protect-a-view.md"])
def test_the_first_example_is_safe_to_retry(name, run_page, settings):
    view, payload = run_page(name)["create_transfer"], {"recipient": "carol", "amount": 5}
    repeat_in_every_way(view, payload, Transfer.objects.all(), settings)


@pytest.mark.parametrize("name", ["README.md", "how-to/protect-a-view.md", "reference/payloads.md"])
def test_the_viewset_takes_effect_once(name, run_page):
    viewset = run_page(name)["ChargeViewSet"]
    if name == "reference/payloads.md":
        viewset.perform_create = lambda self, serializer: serializer.save(account=self.request.user)
    view = viewset.as_view({"post": "create"})

    def send(request):
        force_authenticate(request, request.user)
        return view(request)

    first, retry = twice(send, {"amount": 1000, "currency": "usd"})
    assert (first.status_code, retry.content) == (201, first.content)
    assert Charge.objects.count() == 1


@pytest.mark.failure_89
def test_the_retry_of_a_conditional_change_is_a_replay(run_page):
    view, user = run_page("how-to/protect-a-view.md")["change_transfer"], UserFactory()
    transfer = Transfer.objects.create(account=user, recipient="carol", amount=5)

    def change(key):
        headers = {"Idempotency-Key": key, "If-Match": '"5"'}
        request = RequestFactory().put("/", {"amount": 6}, content_type="application/json", headers=headers)
        request.user = user
        return view(request, pk=transfer.pk)

    answers = [change(key) for key in ("k", "k", "other")]
    assert [(answer.status_code, "Idempotency-Replayed" in answer) for answer in answers] == [
        (200, False),
        (200, True),
        (412, False),
    ]


def test_the_block_outside_http_keeps_its_result(run_page):
    send = run_page("how-to/protect-a-view.md")["send_invoice"]
    assert [send("a", "message-1", {"email": "x@example.org"}) for _ in range(2)] == [{"sent_to": "x@example.org"}] * 2


def test_each_item_of_a_bulk_request_takes_effect_once(run_page):
    run_page("how-to/protect-a-view.md")
    view, user = sys.modules["shop.bulk_views"].import_transfers, UserFactory()

    def send(*items):
        response = post(view, {"items": [{"key": key, "amount": amount} for key, amount in items]}, user=user)
        assert response.status_code == 207
        return json.loads(response.content)["results"]

    first, second = send(("a", 5), ("b", 6))
    assert [item["status"] for item in (first, second)] == [201, 201]
    *replayed, reused, keyless, third = send(("b", 6), ("a", 5), ("a", 7), ("", 8), ("c", 8))
    assert replayed == [second, first]
    assert (reused["status"], reused["code"], reused["retry_after"]) == (422, "idempotency_key_reused", None)
    assert (keyless["status"], keyless["code"]) == (400, "idempotency_key_invalid")
    assert third["status"] == 201
    assert Transfer.objects.count() == 3


def test_the_streamed_report_is_rebuilt(run_page):
    first, retry = twice(run_page("how-to/protect-a-view.md")["create_report"], {})
    assert b"".join(first) == b"".join(retry) == b"a,b\n1,2\n"
    assert IdempotencyRecord.objects.get().response_reference == "7"


def test_the_transfer_is_shown_again_when_its_body_is_deleted(run_page):
    create = run_page("how-to/protect-recorded-data.md")["create_transfer"]
    first, retry = twice(create, {})
    assert retry.content == first.content
    Transfer.objects.update(amount=7)
    purge_body_of("k")
    late = post(create, {}, user=User.objects.get())
    assert (json.loads(late.content)["amount"], late["Idempotency-Replayed"]) == (7, "true")
    assert Transfer.objects.count() == 1


def test_the_form_is_sent_once_and_corrected_under_a_new_key(run_page, settings):
    page = "how-to/protect-a-form.md"
    names = run_page(page)
    first, tagged = blocks(page, "html")
    loader = ("django.template.loaders.locmem.Loader", {"shop/transfer.html": first, "shop/contact.html": tagged})
    settings.TEMPLATES = [{**settings.TEMPLATES[0], "APP_DIRS": False}]
    settings.TEMPLATES[0]["OPTIONS"] = {**settings.TEMPLATES[0]["OPTIONS"], "loaders": [loader]}
    settings.ROOT_URLCONF = (path("", names["in_words"](names["new_transfer"])), path("contact/", names["contact"]))
    browser = Client(enforce_csrf_checks=True)
    browser.force_login(UserFactory())

    def send(shown, url="/", **fields):
        hidden = dict(re.findall(r'<input type="hidden" name="([^"]+)" value="([^"]+)"', shown.content.decode()))
        return browser.post(url, {"recipient": "carol", "amount": 5, **hidden, **fields})

    shown = browser.get("/")
    wrong = send(shown, amount="much")
    answers = [send(wrong) for _ in range(2)]
    assert [answer.status_code for answer in (shown, wrong, *answers)] == [200, 422, 302, 302]
    assert answers[0].url == answers[1].url == f"/transfers/{Transfer.objects.get().pk}/"
    assert b"sent already" in send(wrong, amount=6).content
    browser.logout()
    contact = browser.get("/contact/")
    assert [send(contact, "/contact/").status_code for _ in range(2)] == [201, 201]
    assert IdempotencyRecord.objects.filter(operation="contact.form").count() == 1


def test_an_event_takes_effect_once_however_often_it_is_delivered(run_page, settings):
    view = run_page("how-to/protect-a-webhook.md")["provider_event"]
    settings.PROVIDER_SECRET = "secret"
    Export.objects.create(pk=uuid4(), label="march", account=UserFactory())

    def deliver(event, secret=b"secret"):
        body = json.dumps(event).encode()
        signature = hmac.new(secret, body, "sha256").hexdigest()
        headers = {"X-Signature": signature}
        return view(RequestFactory().post("/", body, content_type="application/json", headers=headers))

    event = {"id": "evt_1", "pending": 2, "data": {"label": "april", "charges": 3}}
    assert deliver(event).status_code == 404  # before its object exists
    Export.objects.update(label="april")
    assert deliver(event).status_code == 204
    Export.objects.update(charges=None)
    again = deliver({**event, "pending": 1})
    assert (again.status_code, again["Idempotency-Replayed"]) == (204, "true")
    assert Export.objects.get().charges is None
    assert [deliver(event, b"wrong").status_code, deliver({"data": {}}).status_code] == [403, 400]
    assert IdempotencyRecord.objects.get().account_id == "provider"


def test_the_key_of_an_event_joins_what_distinguishes_it(run_page):
    names = run_page("how-to/protect-a-webhook.md")

    def key_of(**item):
        payload = {"notificationItems": [{"NotificationRequestItem": item}]}
        return names["adyen_event_id"](RequestFactory().post("/", payload, content_type="application/json"))

    refund = {"eventCode": "REFUND", "pspReference": "79", "success": "true"}
    assert key_of(**refund) == "REFUND:79:true"
    assert key_of(**{**refund, "eventCode": "CHARGEBACK"}) == "CHARGEBACK:79:true"
    assert key_of(eventCode="REFUND") is None


def test_the_order_continues_after_its_completed_step(run_page, provider, monkeypatch):
    view, user = run_page("how-to/call-a-provider.md")["place_order"], UserFactory()
    with monkeypatch.context() as patched:
        patched.setattr("shop.provider.ship", lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            post(view, {}, user=user)
    assert json.loads(post(view, {}, user=user).content) == {"payout": 1, "parcel": 2}
    assert len(provider.paid) == 2


@pytest.fixture
def charges(run_page):
    """The charges of a provider that deduplicates, by its key, for the examples of *Call a provider*."""
    charges = {}

    def charge(request):
        return httpx.Response(201, json={"id": charges.setdefault(request.headers["Idempotency-Key"], len(charges))})

    run_page("how-to/call-a-provider.md")
    sys.modules["shop.cards"].provider._transport = httpx.MockTransport(charge)
    return charges


@pytest.mark.failure_110
@pytest.mark.django_db(transaction=True)
def test_the_card_is_charged_once_and_has_one_row(charges, settings):
    view = sys.modules["shop.cards"].charge_card
    # After the retention, this provider still knows the key, and the row's unique column refuses another one.
    repeat_in_every_way(view, {"amount": 5}, Charge.objects.all(), settings, leave_out=["expiry"])
    assert len(charges) == Charge.objects.count() > 5
    assert {int(charge.reference) for charge in Charge.objects.all()} == {*charges.values()}


@pytest.mark.failure_110
@pytest.mark.django_db(transaction=True)
def test_the_order_is_paid_once_and_has_one_row(run_page, provider, settings):
    view = run_page("how-to/call-a-provider.md")["place_order"]
    repeat_in_every_way(view, {"item": 71}, Charge.objects.all(), settings)
    # Though this provider doesn't deduplicate: each step is called once for each row.
    assert len(provider.paid) == 2 * Charge.objects.count() > 10


@pytest.mark.failure_109
@pytest.mark.django_db(transaction=True)
@pytest.mark.postgres
def test_the_lock_of_the_invoices_outlasts_the_commit(run_page, settings):
    def is_locked():
        with connection.cursor() as cursor:
            cursor.execute("SELECT EXISTS (SELECT FROM pg_locks WHERE locktype = 'advisory' AND objid = 71)")
            return cursor.fetchone()[0]

    view = run_page("how-to/protect-a-view.md")["create_invoice"]
    after_commit = []
    with receiving(signals.completed, lambda: after_commit.append(is_locked())):
        post(view, {"item": 71})
    assert (after_commit, is_locked()) == ([True], False)
    repeat_in_every_way(view, {"item": 71}, Charge.objects.all(), settings)
    assert not is_locked()


def test_the_examples_derive_the_documented_keys(run_page):
    keys_of_this_operation = run_page("explanation/crashes.md")["keys_of_this_operation"]
    with idempotency.claim("docs.derive", account_id="1", key="k") as run:
        keys = keys_of_this_operation()
        run.result = None
    assert (keys["charge"].version, len(keys["payout"])) == (8, 30)
    record = IdempotencyRecord.objects.get()
    assert keys == {"charge": record.derive_key("provider.charge"), "payout": record.derive_text("bank.payout", 30)}


def test_a_parked_record_is_resolved_by_the_providers_answer(run_page):
    resolve = run_page("how-to/resolve-parked-records.md")["resolve"]
    idempotency.Operation.declare("docs.parked", transaction=False, recovery=idempotency.PARK)
    account = str(UserFactory().pk)
    for payout_id, status in ((None, Status.RECOVERABLE), (7, Status.COMPLETED)):
        (pk,) = make_records(1, Status.PARKED, operation="docs.parked", account_id=account)
        record = IdempotencyRecord.objects.get(pk=pk)
        resolve(record.account_id, record.operation, record.idempotency_key, payout_id, 5, "alice")
        record.refresh_from_db()
        assert (record.status, record.response_status) == (status, 201 if payout_id else None)
        assert Payout.objects.count() == (payout_id is not None)


@pytest.mark.failure_111
def test_a_row_and_the_outcome_entered_for_it_commit_together(run_page):
    resolve = run_page("how-to/resolve-parked-records.md")["resolve"]
    idempotency.Operation.declare("docs.parked", transaction=False, recovery=idempotency.PARK)
    (pk,) = make_records(1, Status.PARKED, operation="docs.parked", account_id=str(UserFactory().pk))
    record = IdempotencyRecord.objects.get(pk=pk)
    with pytest.raises(TypeError, match="by"):  # it needs the name of a person
        resolve(record.account_id, record.operation, record.idempotency_key, 7, 5, "")
    record.refresh_from_db()
    assert (record.status, Payout.objects.count()) == (Status.PARKED, 0)


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("has_dashboard", [True, False])
def test_each_alarm_rings_also_without_the_dashboard(run_page, has_dashboard, monkeypatch):
    if not has_dashboard:
        monkeypatch.setattr(extensions, "_extensions", {})
    alarms = run_page("how-to/monitor.md")["alarms"]
    assert not any(alarms().values())
    make_records(1, Status.PARKED)
    assert [name for name, rings in alarms().items() if rings] == ["parked records"]
    make_records(1, Status.IN_PROGRESS, lease=-HOUR)
    make_records(1, expires=-49 * HOUR)
    assert all(alarms().values())


def test_one_key_is_forgotten_in_a_shell():
    (forget,) = re.findall(
        r"^python manage.py shell -c '\n(.*?)^'$", text_of("how-to/resolve-parked-records.md"), re.MULTILINE | re.DOTALL
    )
    account, operation, key = re.search(r'in_scope\("(.*?)", "(.*?)", "(.*?)"\)', forget).groups()
    make_records(1, account_id=account, operation=operation, idempotency_key=key, expires=HOUR)
    exec(forget, {})
    assert IdempotencyRecord.objects.past_retention().count() == 1


@pytest.mark.django_db(transaction=True)
@pytest.mark.usefixtures("whole_tables")
def test_broken_tables_are_repaired_as_described():
    (repair,) = re.findall(
        r"^python manage.py shell <<'END'\n(.*?)^END$", text_of("how-to/troubleshoot.md"), re.MULTILINE | re.DOTALL
    )
    with connection.schema_editor() as editor:
        drop(editor, IdempotencyStep)
        create_without_constraints(editor, IdempotencyRecord)
        drop_field(editor, IdempotencyRecord, "error")
    assert [message.id for message in check_databases(None, ["default"])] == ["idempotency.E032"]
    exec(repair, {})  # as Django's shell does
    assert check_databases(None, ["default"]) == []


def test_the_envelope_replaces_the_problem(run_page):
    envelope, view = run_page("reference/settings.md")["envelope"], run_page("README.md")["create_transfer"]
    with override_settings(IDEMPOTENCY={"ERROR_RESPONSE": envelope}):
        response = post(view, {}, key="a,b")
    assert response.status_code == 400
    assert json.loads(response.content)["error"]["code"] == "idempotency_key_invalid"


def test_the_card_is_charged_under_one_key_by_every_attempt(run_page, server):
    run_page("how-to/call-a-provider.md")
    page = vars(sys.modules["shop.cards"])
    page["provider"].base_url = server.url
    user = UserFactory()
    server.script = [cut]
    answers = [post(page["charge_card"], {"amount": 5}, user=user) for _ in range(3)]
    assert [answer.status_code for answer in answers] == [502, 201, 201]
    assert json.loads(answers[1].content)["provider_id"] == 1
    assert Charge.objects.count() == 1
    assert "Idempotency-Replayed" in answers[2]
    assert server.keys == [str(IdempotencyRecord.objects.get().derive_key("provider.charge"))] * 2


def test_the_settings_for_other_origins_name_each_header(monkeypatch):
    (source,) = [block for block in blocks("how-to/write-a-client.md", "python") if "CORS_ALLOW_HEADERS" in block]
    defaults = ModuleType("corsheaders.defaults")
    defaults.default_headers = ("accept", "content-type")
    for module in (ModuleType("corsheaders"), defaults):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    written = {}
    exec(source, written)
    assert written["CORS_ALLOW_HEADERS"] == ("accept", "content-type", keys.HEADER.lower())
    ours = {PROFILES[IETF].replayed, RETENTION_HEADER, STATUS_HEADER}
    assert {*written["CORS_EXPOSE_HEADERS"]} == {*ours, "Retry-After", "Location"}


FRAMEWORKS = "how-to/use-another-framework.md"
MUTATION = 'mutation { charge(amount: %d, currency: "usd") %s { id amount } }'


def test_the_ninja_route_takes_effect_once(run_page, settings, monkeypatch):
    pytest.importorskip("ninja", reason="Django Ninja is not installed")
    monkeypatch.setitem(connection.settings_dict, "ATOMIC_REQUESTS", True)
    UserFactory(pk=1)
    settings.ROOT_URLCONF = tuple(run_page(FRAMEWORKS)["urlpatterns"])
    headers = {"Authorization": "Bearer alices-token", "Idempotency-Key": "k"}
    payload = {"amount": 5, "currency": "usd"}
    sent = {"data": payload, "content_type": "application/json", "headers": headers}
    answers = [Client().post("/api/charges", **sent) for _ in range(2)]
    assert [answer.status_code for answer in answers] == [201, 201]
    assert answers[1]["Idempotency-Replayed"] == "true"
    assert Charge.objects.count() == 1


def test_the_mutation_takes_effect_once(run_page):
    pytest.importorskip("strawberry", reason="Strawberry is not installed")
    run_page(FRAMEWORKS)
    schema = sys.modules["shop.strawberry_schema"].schema
    user = UserFactory()

    def mutate(key, amount):
        request = RequestFactory().post("/")
        request.user = user
        mutation = MUTATION % (amount, f'@idempotent(key: "{key}")' if key else "")
        return schema.execute_sync(mutation, context_value=SimpleNamespace(request=request))

    def code(result):
        return str(result.errors[0].extensions["code"])

    first, retry = mutate("k", 5), mutate("k", 5)
    assert first.errors is None
    assert first.data == retry.data
    assert code(mutate("k", 6)) == "idempotency_key_reused"
    assert code(mutate(None, 5)) == "idempotency_key_invalid"
    user = AnonymousUser()
    assert code(mutate("k", 5)) == "idempotency_account_required"
    assert Charge.objects.count() == 1


@pytest.mark.parametrize("by", ["arguments", "request"])
def test_the_tool_of_an_agent_takes_effect_once(run_page, by):
    run_page(FRAMEWORKS)
    tool, user = sys.modules["shop.mcp_tools"].charge_tool, UserFactory()

    def call(meta, amount=5):
        arguments = {"amount": amount, "currency": "usd"}
        if by == "request":
            return tool(user, arguments, meta)
        return tool(user, {**arguments, "meta": meta})

    first, retry = call({"idempotency_key": "k"}), call({"idempotency_key": "k"})
    assert first == retry == {"isError": False, "structuredContent": {"id": Charge.objects.get().pk}}
    for meta, amount, code in (({"idempotency_key": "k"}, 6, "key_reused"), ({}, 5, "key_invalid")):
        refused = call(meta, amount)
        assert (refused["isError"], refused["structuredContent"]["code"]) == (True, f"idempotency_{code}")
    assert Charge.objects.count() == 1


@pytest.mark.parametrize("deliveries", [1, 2])
def test_a_django_task_takes_effect_once(run_page, settings, deliveries):
    tasks = "django.tasks" if django.VERSION >= (6,) else "django_tasks"  # the package for older versions
    settings.TASKS = {"default": {"BACKEND": f"{tasks}.backends.immediate.ImmediateBackend"}}
    run_page("how-to/publish-a-message.md")
    sent = {"charge_id": ChargeFactory().pk}
    with idempotency.claim("docs.tasks", account_id="1", key="k") as run:
        message = publish("shop.receipts.send_receipt", sent, sender="shop.task_sender.send")
        run.result = None
    for _ in range(deliveries):
        sys.modules["shop.task_sender"].send(message)
    assert Notification.objects.count() == 1
