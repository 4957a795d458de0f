"""The retry lab in a browser: a cart is paid once, however the visitor uses the page."""

import pytest

from idempotency.models import IdempotencyRecord
from testproject.models import Charge, UnprotectedCharge

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.once]

#: Milliseconds for which the server works, so that a test can act on the page meanwhile.
SLOW = 1500

OFFLINE = {"offline": True, "latency": 0, "downloadThroughput": -1, "uploadThroughput": -1}


class Lab:
    def __init__(self, driver, url):
        self.driver = driver
        self.url = f"{url}/lab/"
        self.carts = 1
        self.open()

    def open(self):
        self.driver.get(self.url)

    def lose_nothing(self):
        script = "for (const id of ['latency', 'lost-after']) localStorage.setItem(`lab:${id}`, '0')"
        self.driver.execute_script(script)
        self.open()

    def take_new_cart(self):
        cart = "return document.body.dataset.cart"
        before = self.driver.execute_script(cart)
        self.driver.execute_script("document.forms[0].submit()")
        self.until(lambda: self.driver.execute_script(cart) not in (None, before))
        self.carts += 1

    def until(self, condition):
        from selenium.webdriver.support.wait import WebDriverWait

        return WebDriverWait(self.driver, 60, poll_frequency=0.05).until(lambda _: condition())

    def text(self, name):
        return str(self.driver.execute_script("return document.getElementById(arguments[0]).textContent", name))

    def work_slowly(self):
        script = "const slider = document.getElementById('latency'); slider.value = arguments[0];"
        self.driver.execute_script(f"{script} slider.dispatchEvent(new Event('input'))", SLOW)

    def press(self, times=1):
        self.driver.execute_script(
            "for (let press = 0; press < arguments[0]; press += 1) document.getElementById('pay').click()", times
        )

    def is_under_way(self):
        return IdempotencyRecord.objects.filter(status="in_progress").exists()

    def must_be_paid(self):
        self.until(lambda: self.text("outcome") == "Paid.")
        assert Charge.objects.count() == self.carts
        self.until(lambda: self.text("protected-effects") == "1 charge")


@pytest.fixture
def lab(chromium, live_server):
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
    chromium.get("about:blank")  # stops polling while the tables are emptied


KEY_OF = "return JSON.parse(localStorage.getItem(`pay-once:${document.body.dataset.cart}`)).key"


def test_the_first_press_shows_the_difference(lab):
    lab.press()
    lab.must_be_paid()
    lab.until(lambda: UnprotectedCharge.objects.count() >= 2)
    assert "lost on the way back" in lab.text("protected-attempts")


def test_a_cart_is_paid_once_despite_clicks_reloads_tabs_and_outages(lab):
    lab.lose_nothing()
    lab.press(times=2)  # a double click
    lab.must_be_paid()
    lab.until(lambda: lab.text("unprotected-effects") == "2 charges")
    lab.until(lambda: all(f"{press}sent" in lab.text("protected-attempts") for press in (1, 2)))
    assert (lab.text("protected-total"), lab.text("unprotected-total")) == ("10.00", "20.00")
    assert UnprotectedCharge.objects.count() == 2

    lab.driver.get(lab.url.replace("/lab/", "/health/"))
    lab.driver.back()
    lab.must_be_paid()
    lab.press()
    lab.until(lambda: lab.text("unprotected-effects") == "3 charges")
    lab.until(lambda: "replayed" in lab.text("protected-attempts"))
    lab.must_be_paid()

    lab.take_new_cart()
    lab.work_slowly()
    lab.press()
    lab.until(lab.is_under_way)
    key = lab.text("key")
    lab.driver.refresh()
    assert lab.text("key") == key
    lab.must_be_paid()
    assert IdempotencyRecord.objects.latest("id").idempotency_key == key

    lab.take_new_cart()
    lab.driver.execute_script("document.getElementById('tabs').click()")
    lab.until(lambda: len(lab.driver.window_handles) == 6)
    first, *others = lab.driver.window_handles
    for handle in others:
        lab.driver.switch_to.window(handle)
        lab.must_be_paid()
    lab.until(lambda: lab.text("unprotected-effects") == "5 charges")
    lab.must_be_paid()
    lab.driver.switch_to.window(first)

    lab.take_new_cart()
    lab.driver.execute_cdp_cmd("Network.enable", {})
    lab.driver.execute_cdp_cmd("Network.emulateNetworkConditions", OFFLINE)
    lab.press()
    lab.until(lambda: "no answer" in lab.text("protected-attempts"))
    assert lab.driver.execute_script(KEY_OF)
    assert Charge.objects.count() == lab.carts - 1
    lab.driver.execute_cdp_cmd("Network.emulateNetworkConditions", {**OFFLINE, "offline": False})
    lab.must_be_paid()

    lab.take_new_cart()  # a request refused before it runs is sent again with the same key
    lab.driver.delete_cookie("csrftoken")
    lab.press()
    lab.until(lambda: lab.text("outcome") == "Refused with 403.")
    key = lab.driver.execute_script(KEY_OF)
    lab.open()
    lab.must_be_paid()
    assert IdempotencyRecord.objects.latest("id").idempotency_key == key


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


def test_a_client_bounds_any_retry_after_and_stops_once_the_key_is_removed(lab):
    status, waits, gone = lab.driver.execute_async_script(WAITS)
    assert gone is None, status
    waits = [wait for wait in waits if wait != 400]  # the interval at which the page polls the state
    assert (status, len(waits)) == (200, 2)
    assert all(isinstance(wait, (int, float)) and 0 < wait <= 60_000 for wait in waits)


OUTCOMES = """
const [rows, done] = arguments, real = window.setTimeout;
window.setTimeout = (then) => real(then, 0);
import("/lab/static/pay-once.js").then(async ({ kept, payOnce }) => {
  const found = [];
  for (const [name, status, text, known, redirected] of rows) {
    let sent = 0;
    const send = async () => {
      sent += 1;
      const headers = known ? { "Idempotency-Status": known } : {};
      const response = sent === 1
        ? new Response(status === 204 ? null : text, { status, headers })
        : new Response('{"last": true}', { status: 201, headers: { "Idempotency-Status": "replayed" } });
      Object.defineProperty(response, "redirected", { value: redirected });
      return response;
    };
    const answer = await payOnce(name, "/", {}, { send });
    found.push([name, answer?.status ?? null, Boolean(kept(name).outcome), sent]);
  }
  window.setTimeout = real;
  done(found);
}).catch((error) => done(String(error)));
"""

#: The first response: its status, body, ``Idempotency-Status``, and whether it was redirected. Then the result: the
#: status for the page, whether it is kept, and the number of requests sent.
ANSWERS = {
    "executed": ((201, "{}", "executed", False), (201, True, 1)),
    "executed without a body": ((204, "", "executed", False), (204, True, 1)),
    "a recorded refusal": ((402, "{}", "executed", False), (402, True, 1)),
    "a recorded fault": ((503, "{}", "replayed", False), (503, True, 1)),
    "a server without the header": ((201, "{}", None, False), (201, True, 1)),
    "unprotected": ((201, "{}", "ignored", False), (201, True, 1)),
    "a fault, unprotected": ((503, "{}", "ignored", False), (503, False, 1)),
    "a login page": ((200, "<html>", None, True), (None, False, 1)),
    "a login page without a redirect": ((200, "<html>", None, False), (None, False, 1)),
    "a login page of this project": ((200, "{}", "unknown", False), (None, False, 1)),
    "an answer from another url": ((200, "{}", None, True), (None, False, 1)),
    "an error of a proxy": ((404, "<html>", None, False), (404, False, 1)),
    "a refusal without the header": ((402, "{}", None, False), (402, False, 1)),
    "a throttle": ((429, "{}", "unknown", False), (201, True, 2)),
    "an expired session": ((403, "{}", "unknown", False), (403, False, 1)),
    "another payload": ((422, "{}", "reused", False), (422, False, 1)),
    "recorded and unreadable": ((500, "{}", "recorded", False), (500, False, 1)),
    "outcome unknown": ((409, '{"code": "idempotency_outcome_unknown"}', "unknown", False), (409, False, 1)),
    "in progress": ((409, "{}", "in-progress", False), (201, True, 2)),
    "in progress, accepted": ((202, "{}", "in-progress", False), (201, True, 2)),
    "in progress, by profile stripe": (
        (409, '{"error": {"code": "idempotency_key_in_use"}}', None, False),
        (201, True, 2),
    ),
    "in progress, by profile acp": ((409, '{"code": "idempotency_in_flight"}', None, False), (201, True, 2)),
    "accepted": ((202, "{}", None, False), (201, True, 2)),
    "a fault": ((500, "<html>", None, False), (201, True, 2)),
}


@pytest.mark.failure_97
def test_the_page_keeps_only_outcomes_of_the_payment(lab):
    rows = [[name, *sent] for name, (sent, _) in ANSWERS.items()]
    found = lab.driver.execute_async_script(OUTCOMES, rows)
    assert found == [[name, *expected] for name, (_, expected) in ANSWERS.items()]
