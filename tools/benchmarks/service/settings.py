"""The sample project's settings, with the addresses of the compared views, and without the counters of the dashboard:
they are an app of their own, and the hand-written views count nothing.
"""

from testproject.settings import *  # noqa: F403
from testproject.settings import DATABASES, INSTALLED_APPS, env

INSTALLED_APPS = [app for app in INSTALLED_APPS if app != "idempotency.contrib.dashboard"]
ROOT_URLCONF = "tools.benchmarks.service.urls"

# As a server needs it that has a thread for each request: the connections outlive the threads.
if size := env.int("BENCHMARK_POOL", default=0):
    DATABASES["default"]["CONN_MAX_AGE"] = 0
    DATABASES["default"]["OPTIONS"]["pool"] = {"min_size": min(size, 4), "max_size": size, "timeout": 60}
