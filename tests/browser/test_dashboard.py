"""The dashboard in a browser: under a strict policy, on a phone, in dark mode; and its pictures for the docs."""

import os
import re

import pytest
from django.contrib.auth.models import User
from django.http import HttpResponse
from django.urls import reverse
from pytest_django.live_server_helper import LiveServer

from idempotency.contrib.dashboard.counting import this_hour
from idempotency.contrib.dashboard.models import IdempotencyCounter
from idempotency.lifecycle import Status
from idempotency.outbox.models import MessageStatus
from tests.docs.pages import DOCS
from tests.outbox import make_messages
from tests.records import HOUR, MINUTE, make_records

pytestmark = pytest.mark.once

POLICY = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; form-action 'self'"

#: Writes the console's errors into the page, and whether the page is wider than its window.
WATCH = """
addEventListener("securitypolicyviolation", (event) => {
    document.documentElement.dataset.refused = `${event.violatedDirective} ${event.sourceFile || ""}`;
});
addEventListener("error", (event) => { document.documentElement.dataset.error = event.message; });
addEventListener("load", () => {
    const page = document.documentElement;
    page.dataset.width = `${page.scrollWidth > innerWidth ? "too wide" : "fits"} ${innerWidth}`;
});
"""


class Watched:
    """Middleware that logs each visitor in, sends a strict policy, and makes the page report the browser's refusals."""

    #: HTML added at the end of the page.
    planted = ""

    def __init__(self, get_response):
        self.get_response = get_response

    def __call__(self, request):
        if request.path == "/watch.js":
            return HttpResponse(WATCH, content_type="text/javascript")
        request.user = User.objects.get()
        response = self.get_response(request)
        response["Content-Security-Policy"] = POLICY
        if "html" in response["Content-Type"]:
            page = response.content.decode().replace("<head>", '<head><script src="/watch.js"></script>')
            response.content = page.replace("</body>", f"{self.planted}</body>").encode()
        return response


@pytest.fixture
def url(transactional_db, settings, chromium):
    """The URL of the dashboard of a project with events and records."""
    settings.MIDDLEWARE = [*settings.MIDDLEWARE, "tests.browser.test_dashboard.Watched"]
    User.objects.create(username="olga", is_staff=True, is_superuser=True)
    per_hour = {"claimed": 400, "replayed": 90, "conflicted": 25, "key_reused": 6, "taken_over": 3, "released": 12}
    counted = [
        (hour, operation, event, round(number * share * (1.2 - abs(hour - 11) / 14)))
        for hour in range(25)
        for operation, share in (("charges.create", 1), ("payouts.create", 0.3))
        for event, number in per_hour.items()
    ]
    IdempotencyCounter.objects.bulk_create(
        IdempotencyCounter(hour=this_hour() - hour, operation=operation, event=event, total=total)
        for hour, operation, event, total in counted
    )
    make_records(40)
    make_records(2, Status.PARKED, operation="payouts.create", expires=HOUR)
    make_records(1, Status.IN_PROGRESS, lease=-2 * MINUTE, expires=HOUR)
    make_messages(1, MessageStatus.DEAD)
    make_messages(3, due=-MINUTE / 2)
    server = LiveServer("localhost")  # the live_server fixture has already read the settings
    yield f"{server.url}{reverse('admin:idempotency_dashboard')}"
    chromium.get("about:blank")
    chromium.get_log("browser")  # clears the log, so that it has entries of one test only
    chromium.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    chromium.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
    server.stop()


def show(chromium, url, size=(1100, 1500), *, dark=False):
    """Open a page in a window of this size. Returns its source after its scripts have run."""
    screen = {"width": size[0], "height": size[1], "deviceScaleFactor": 1, "mobile": False}
    theme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
    chromium.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
    chromium.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": theme})
    chromium.get(url)
    return str(chromium.page_source)


def test_the_chart_is_drawn_under_a_strict_policy_and_fits_a_phone(chromium, url):
    page = show(chromium, url, (390, 2400))
    assert "<canvas" in page
    assert 'class="u-legend' in page
    assert re.findall(r'data-(?:refused|error)="[^"]*"', page[:2000]) == []
    assert 'data-width="fits' in page[:2000], page[:2000]


def test_a_breach_of_the_content_policy_would_be_detected(chromium, url, monkeypatch):
    monkeypatch.setattr(Watched, "planted", "<script>document.body.dataset.ran = 1</script>")
    page = show(chromium, url)
    assert 'data-refused="script-src-elem' in page[:2000]
    assert "data-ran" not in page


@pytest.mark.parametrize(
    ("name", "size", "dark"),
    [("light", (1100, 1560), False), ("dark", (1100, 1560), True), ("phone", (500, 2300), False)],
)
def test_a_picture_can_be_taken_and_is_in_the_documentation(chromium, url, tmp_path, name, size, dark):
    """With UPDATE_PICTURES=1, the new picture replaces the one in the documentation."""
    target = DOCS / "pictures" if os.environ.get("UPDATE_PICTURES") else tmp_path
    show(chromium, url, size, dark=dark)
    assert chromium.save_screenshot(str(target / f"dashboard-{name}.png"))
    assert (DOCS / "pictures" / f"dashboard-{name}.png").exists(), "take it with UPDATE_PICTURES=1"
