"""The retry lab in a browser: whatever a visitor does to the page, a cart is paid once."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from idempotency.models import IdempotencyRecord
from testproject.models import Charge, UnprotectedCharge

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.once]

#: Milliseconds for which the server works, so that something can be done to the page meanwhile.
SLOW = 1500

OFFLINE = {"offline": True, "latency": 0, "downloadThroughput": -1, "uploadThroughput": -1}


class Lab:
    """The page, as a visitor uses it."""

    def __init__(self, driver: Any, url: str) -> None:
        self.driver = driver
        self.url = f"{url}/lab/"
        self.open()

    def open(self) -> None:
        self.driver.get(self.url)

    def until(self, condition: Callable[[], Any]) -> Any:
        from selenium.webdriver.support.wait import WebDriverWait

        return WebDriverWait(self.driver, 60, poll_frequency=0.05).until(lambda _: condition())

    def text(self, name: str) -> str:
        return str(self.driver.execute_script("return document.getElementById(arguments[0]).textContent", name))

    def work_slowly(self) -> None:
        script = "const slider = document.getElementById('latency'); slider.value = arguments[0];"
        self.driver.execute_script(f"{script} slider.dispatchEvent(new Event('input'))", SLOW)

    def press(self, times: int = 1) -> None:
        self.driver.execute_script(
            "for (let press = 0; press < arguments[0]; press += 1) document.getElementById('pay').click()", times
        )

    def is_under_way(self) -> bool:
        return IdempotencyRecord.objects.filter(status="in_progress").exists()

    def must_be_paid(self) -> None:
        self.until(lambda: self.text("outcome") == "Paid.")
        assert Charge.objects.count() == 1
        self.until(lambda: self.text("protected-effects") == "1")


@pytest.fixture
def lab(chromium: Any, live_server: Any) -> Iterator[Lab]:
    chromium.get(f"{live_server.url}/health/")
    chromium.delete_all_cookies()
    chromium.execute_script("localStorage.clear()")
    page = Lab(chromium, live_server.url)
    yield page
    first, *others = chromium.window_handles
    for handle in others:
        chromium.switch_to.window(handle)
        chromium.close()
    chromium.switch_to.window(first)
    errors = [entry["message"] for entry in chromium.get_log("browser") if "Content Security" in entry["message"]]
    assert not errors
    chromium.get("about:blank")  # no look at a state whose tables are being emptied


def test_a_double_click_pays_once(lab: Lab) -> None:
    lab.press(times=2)
    lab.must_be_paid()
    lab.until(lambda: lab.text("unprotected-effects") == "2")
    assert UnprotectedCharge.objects.count() == 2


def test_a_reload_in_the_middle_finds_the_key_and_the_outcome(lab: Lab) -> None:
    lab.work_slowly()
    lab.press()
    lab.until(lab.is_under_way)
    key = lab.text("key")
    lab.driver.refresh()
    assert lab.text("key") == key
    lab.must_be_paid()
    assert IdempotencyRecord.objects.get().idempotency_key == key


def test_the_back_button_finds_what_was_paid(lab: Lab) -> None:
    lab.press()
    lab.must_be_paid()
    lab.driver.get(lab.url.replace("/lab/", "/health/"))
    lab.driver.back()
    lab.must_be_paid()
    lab.press()
    lab.until(lambda: lab.text("unprotected-effects") == "2")
    lab.must_be_paid()


def test_five_tabs_that_pay_at_once_pay_once(lab: Lab) -> None:
    lab.work_slowly()
    lab.driver.execute_script("document.getElementById('tabs').click()")
    lab.until(lambda: len(lab.driver.window_handles) == 6)
    for handle in lab.driver.window_handles[1:]:
        lab.driver.switch_to.window(handle)
        lab.must_be_paid()
    lab.until(lambda: lab.text("unprotected-effects") == "5")
    lab.must_be_paid()


def test_a_visitor_who_goes_offline_and_comes_back_pays_once(lab: Lab) -> None:
    lab.driver.execute_cdp_cmd("Network.enable", {})
    lab.driver.execute_cdp_cmd("Network.emulateNetworkConditions", OFFLINE)
    lab.press()
    lab.until(lambda: "no answer" in lab.text("protected-attempts"))
    assert json.loads(
        lab.driver.execute_script("return localStorage.getItem(`pay-once:${document.body.dataset.cart}`)")
    )
    assert Charge.objects.count() == 0
    lab.driver.execute_cdp_cmd("Network.emulateNetworkConditions", {**OFFLINE, "offline": False})
    lab.must_be_paid()


def test_a_request_that_was_refused_before_it_ran_is_sent_again_with_its_key(lab: Lab) -> None:
    key_of = "return JSON.parse(localStorage.getItem(`pay-once:${document.body.dataset.cart}`)).key"
    lab.driver.delete_cookie("csrftoken")
    lab.press()
    lab.until(lambda: lab.text("outcome") == "Refused with 403.")
    key = lab.driver.execute_script(key_of)
    lab.open()
    lab.must_be_paid()
    assert IdempotencyRecord.objects.get().idempotency_key == key


WAITS = """
const done = arguments[0], real = window.setTimeout, waits = [], answers = ["Wed, 21 Oct 2026 07:28:00 GMT", "86400"];
window.setTimeout = (then, milliseconds) => { waits.push(milliseconds); return real(then, 0); };
const send = async () => {
  const after = answers.shift();
  return after ? new Response(null, { status: 503, headers: { "Retry-After": after } }) : new Response("{}");
};
const logOut = async () => { localStorage.clear(); throw new TypeError("lost"); };
import("/lab/static/pay-once.js").then(async ({ payOnce }) => {
  const outcome = await payOnce("waits", "/", {}, { send });
  window.setTimeout = real;
  done([outcome.status, waits, await payOnce("gone", "/", {}, { send: logOut })]);
}).catch((error) => done([String(error), [], error]));
"""


def test_whatever_a_proxy_says_of_the_wait_it_is_bounded_and_a_removed_key_ends_it(lab: Lab) -> None:
    status, waits, gone = lab.driver.execute_async_script(WAITS)
    assert gone is None, status
    waits = [wait for wait in waits if wait != 400]  # the page looks at the state so often
    assert (status, len(waits)) == (200, 2)
    assert all(isinstance(wait, (int, float)) and 0 < wait <= 60_000 for wait in waits)
