"""The sample project's settings, for the processes of the crash harness."""

from __future__ import annotations

import os

from testproject.settings import *  # noqa: F403
from testproject.settings import DATABASES

ROOT_URLCONF = "tests.crash.urls"
# A request costs the claim, the handler and the completing update, and as little else as possible.
MIDDLEWARE: list[str] = []
LOGGING = {
    "version": 1,
    "disable_existing_loggers": False,
    "handlers": {"none": {"class": "logging.NullHandler"}, "console": {"class": "logging.StreamHandler"}},
    # Processes are broken on purpose, and say so at length.
    "root": {"handlers": ["console" if os.environ.get("CRASH_LOG") else "none"], "level": "INFO"},
}
if DATABASES["default"]["ENGINE"] == "django.db.backends.sqlite3":
    # Whoever waits for a frozen process's lock is to be refused soon.
    DATABASES["default"]["OPTIONS"]["timeout"] = 1
