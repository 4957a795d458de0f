"""The sample project's settings, with a lease shorter than the nemesis's freezes."""

from datetime import timedelta

from testproject.harness.redis import redelivering
from tests.harness.settings import *  # noqa: F403
from tests.harness.settings import IDEMPOTENCY
from tests.soak.load import LEASE

ROOT_URLCONF = "tests.soak.urls"
SILENCED_SYSTEM_CHECKS = ["admin.E408", "admin.E409", "admin.E410"]  # without the admin's middleware
# The first sets Content-Length, so that the server sends no chunks. The second adds Idempotency-Status to a crash.
MIDDLEWARE = ["django.middleware.common.CommonMiddleware", "idempotency.middleware.IdempotencyMiddleware"]
IDEMPOTENCY |= {"LEASE": timedelta(seconds=LEASE)}
CELERY_BROKER_TRANSPORT_OPTIONS = redelivering(3.0, look_every=0.2)
