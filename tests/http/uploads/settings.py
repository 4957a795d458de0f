"""A project whose views take uploads, for real servers."""

from testproject.settings import *  # noqa: F403

ROOT_URLCONF = "tests.http.uploads.urls"
