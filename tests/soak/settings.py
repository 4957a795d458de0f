"""The sample project's settings, with a lease that is shorter than what the nemesis freezes."""

from datetime import timedelta

from testproject.harness.redis import redelivering
from tests.harness.settings import *  # noqa: F403
from tests.harness.settings import IDEMPOTENCY

ROOT_URLCONF = "tests.soak.urls"
SILENCED_SYSTEM_CHECKS = ["admin.E408", "admin.E409", "admin.E410"]  # no middleware of the admin
# It sets Content-Length, without which a server sends chunks.
MIDDLEWARE = ["django.middleware.common.CommonMiddleware"]
IDEMPOTENCY |= {"LEASE": timedelta(seconds=2)}
CELERY_BROKER_TRANSPORT_OPTIONS = redelivering(3.0, look_every=0.2)
