"""The sample project's settings, for the processes of the harness."""

import os
from datetime import timedelta

from testproject.settings import *  # noqa: F403
from testproject.settings import DATABASES

# A request should cost little besides the claim, the handler and the completing update.
MIDDLEWARE = []
LOGGING = {
    "version": 1,
    "disable_existing_loggers": False,
    "handlers": {"console": {"class": "logging.StreamHandler"}},
    # Processes are broken on purpose, and write long errors to the run's log.
    "root": {"handlers": ["console"], "level": os.environ.get("HARNESS_LOG", "WARNING")},
}
#: A message whose claim is live is delivered again after a second instead of half a minute.
IDEMPOTENCY = {"MAX_RETRY_AFTER": timedelta(seconds=1)}
if DATABASES["default"]["ENGINE"] == "django.db.backends.sqlite3":
    # A process that waits for a frozen process's lock should be refused soon.
    DATABASES["default"]["OPTIONS"]["timeout"] = 1

CELERY_WORKER_HIJACK_ROOT_LOGGER = False
CELERY_WORKER_REDIRECT_STDOUTS = False
#: How long the worker's main process waits for the result of a child that has died, in seconds; Celery's default is 10.
CELERY_WORKER_LOST_WAIT = 0.3
CELERY_WORKER_SEND_TASK_EVENTS = False
CELERY_TASK_IGNORE_RESULT = True
CELERY_BROKER_POOL_LIMIT = 1
