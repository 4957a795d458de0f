"""The sample project's settings, under the profile that the suite judges."""

import os

from testproject.settings import *  # noqa: F403

ROOT_URLCONF = "tests.conformance.urls"
MIDDLEWARE = ["tests.conformance.urls.arriving", *MIDDLEWARE]  # noqa: F405
IDEMPOTENCY = {"PROFILE": os.environ["CONFORMANCE_PROFILE"]}
# A duplicate of an export attaches to its job, which ACP doesn't know. The suite judges charges.
SILENCED_SYSTEM_CHECKS = ["idempotency.E043"]
