"""Forms of a server-rendered page: double clicks, the back button, corrections, redirects and messages."""

import re
import sys

import pytest
from django import forms
from django.contrib import messages
from django.contrib.auth.decorators import login_required
from django.contrib.messages import get_messages
from django.http import HttpResponse, QueryDict
from django.shortcuts import redirect
from django.template import engines
from django.test import Client
from django.urls import path

from idempotency import idempotent
from idempotency.conf import is_recordable_unless_invalid
from idempotency.http.forms import IdempotencyKeyMixin
from idempotency.http.key_sources import FromForm
from idempotency.protocol.faults import fault_point
from testproject.models import Transfer
from tests.factories import UserFactory
from tests.http.callers import effects, problem_code

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.once]


class TransferForm(IdempotencyKeyMixin, forms.ModelForm):
    class Meta:
        model = Transfer
        fields = ("recipient", "amount")


@login_required
@idempotent("forms.transfer", key=FromForm(), recordable=is_recordable_unless_invalid)
def transfer(request):
    form = TransferForm(request.POST or None, initial=request.GET)  # a link may fill the form
    if form.is_valid():
        made = Transfer.objects.create(account=request.user, **form.cleaned_data)
        request.session["last"] = made.pk
        messages.success(request, "Sent.")
        return redirect(f"/{made.pk}/")
    return HttpResponse(form.as_p(), status=422 if form.is_bound else 200)


def shown(request, pk):
    return HttpResponse(" ".join(str(message) for message in get_messages(request)))


def tagged(request):
    template = engines["django"].from_string("{% load idempotency %}{% idempotency_key %}{% idempotency_key 'other' %}")
    return HttpResponse(template.render({}, request))


@pytest.fixture
def browser(settings):
    settings.ROOT_URLCONF = (path("", transfer), path("<int:pk>/", shown), path("tag/", tagged))
    settings.LOGIN_URL = "/login/"
    client = Client()
    client.force_login(UserFactory())
    return client


def key_in(page):
    (field,) = re.findall(r'<input type="hidden" name="idempotency_key"[^>]*>', page.content.decode())
    assert 'autocomplete="off"' in field  # else Firefox keeps the value when the page is reloaded
    (key,) = re.findall(r'value="([^"]+)"', field)
    return str(key)


def filled(page, **fields):
    return {"recipient": "carol", "amount": 5, "idempotency_key": key_in(page), **fields}


def test_a_double_click_and_the_back_button_send_one_transfer(browser):
    assert problem_code(browser.post("/", {"recipient": "carol", "amount": 5})) == "idempotency_key_missing"
    page = browser.get("/")
    first, second = (browser.post("/", filled(page)) for _ in range(2))
    assert (first.status_code, second.status_code, second.url) == (302, 302, first.url)
    assert (second["Idempotency-Replayed"], effects()) == ("true", 1)
    assert browser.post("/", filled(browser.get("/"))).url != first.url  # a page loaded again makes another transfer
    by_header = browser.post("/", {"recipient": "carol", "amount": 5}, headers={"Idempotency-Key": "k"})
    assert by_header.status_code == 302


def test_a_corrected_form_has_a_new_key(browser):
    page = browser.get("/")
    wrong = browser.post("/", filled(page, amount="much"))
    assert (wrong.status_code, effects()) == (422, 0)
    assert key_in(wrong) != key_in(page)
    assert browser.post("/", filled(wrong)).status_code == 302
    assert problem_code(browser.post("/", filled(wrong, amount=6))) == "idempotency_key_reused"
    assert effects() == 1


@pytest.mark.failure_80
def test_two_orders_from_one_link_are_two_transfers(browser):
    link = "/?recipient=carol&idempotency_key=of-the-link"
    for _ in range(2):
        assert browser.post(link, filled(browser.get(link))).status_code == 302
    assert effects() == 2


LINK = QueryDict("idempotency_key=of-the-link&form-0-idempotency_key=of-the-link")


def given_later():
    form = TransferForm()
    form.fields["idempotency_key"].initial = "of-the-link"
    return form


lines = forms.formset_factory(TransferForm, extra=1)


@pytest.mark.parametrize(
    "shown_form",
    [
        lambda: TransferForm(initial=LINK),
        lambda: TransferForm(initial=LINK, prefix="form-0"),
        lambda: TransferForm(LINK),
        lambda: lines(initial=[LINK.dict()]),
        lambda: lines(initial=[LINK.dict()]).empty_form,
        given_later,
    ],
    ids=["query", "prefix", "bound", "formset", "empty form", "later"],
)
def test_a_form_has_a_new_key_for_every_source_of_initial_values(shown_form):
    form = shown_form()
    pages = [form.as_p(), form.as_p(), shown_form().as_p()]
    keys = [re.findall(r'idempotency_key" value="([^"]+)"', page) for page in pages]
    assert keys[0]
    assert "of-the-link" not in keys[0] + keys[2]
    assert keys[0] == keys[1]  # one page has one key, even if it renders the form twice
    assert not set(keys[0]) & set(keys[2])


def test_the_template_tag_makes_a_new_key_each_time(browser):
    pages = [browser.get("/tag/") for _ in range(2)]
    assert len({key_in(page) for page in pages}) == 2
    assert b'name="other"' in pages[0].content


def test_an_empty_form_of_a_formset_stays_empty():
    data = {"form-TOTAL_FORMS": "1", "form-INITIAL_FORMS": "0", "form-0-amount": "", "form-0-idempotency_key": "k"}
    formset = lines(data)
    assert formset.is_valid()
    assert formset.cleaned_data == [{}]


@pytest.mark.parametrize("saved", [False, True])
def test_a_session_that_the_handler_saves_survives_a_crash_after_commit(browser, settings, saved, monkeypatch):
    @login_required
    @idempotent("forms.session", key=FromForm())
    def view(request):
        request.session["last"] = "sent"
        if saved:
            request.session.save()
        return HttpResponse(status=201)

    settings.ROOT_URLCONF = (path("", view),)
    with monkeypatch.context() as patched:
        patched.setitem(fault_point, "complete.committed", sys.exit)  # no middleware runs after it
        with pytest.raises(SystemExit):
            browser.post("/", {"idempotency_key": "k"})
    assert browser.post("/", {"idempotency_key": "k"})["Idempotency-Replayed"] == "true"
    assert browser.session.get("last") == ("sent" if saved else None)


@pytest.mark.parametrize(("storage", "survives"), [("cookie.CookieStorage", False), ("session.SessionStorage", True)])
def test_what_middleware_writes_is_not_replayed(browser, settings, storage, survives):
    """The first response is lost with its cookies, as after a double click. The session's row is kept."""
    settings.MESSAGE_STORAGE = f"django.contrib.messages.storage.{storage}"

    page = browser.get("/")
    cookies = browser.cookies.copy()
    first = browser.post("/", filled(page))
    browser.cookies = cookies
    replay = browser.post("/", filled(page))
    assert "messages" not in replay.cookies
    assert browser.session["last"] == Transfer.objects.get().pk
    assert browser.get(first.url).content.decode() == ("Sent." if survives else "")
    assert browser.get(first.url).content == b""  # shown once, however often the form was sent
