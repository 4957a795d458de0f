"""The sample project's settings, with the URLs of the compared views.

The dashboard and its counters are removed, because the hand-written views count nothing.
"""

from testproject.settings import *  # noqa: F403
from testproject.settings import DATABASES, INSTALLED_APPS, env

INSTALLED_APPS = [app for app in INSTALLED_APPS if app != "idempotency.contrib.dashboard"]
ROOT_URLCONF = "tools.benchmarks.service.urls"

# A server with a thread for each request needs connections that outlive the threads.
if size := env.int("BENCHMARK_POOL", default=0):
    DATABASES["default"]["CONN_MAX_AGE"] = 0
    DATABASES["default"]["OPTIONS"]["pool"] = {"min_size": min(size, 4), "max_size": size, "timeout": 60}
