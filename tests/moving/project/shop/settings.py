"""What the project has besides an idempotency package. The guide's settings follow below."""

from __future__ import annotations

import os
from pathlib import Path

#: Every deploy of the project has the same database, cache and log of runs.
SHARED = Path(os.environ["SHARED"])

DEBUG = True
SECRET_KEY = "tests"
ROOT_URLCONF = "shop.urls"
DATABASES = {
    "default": {"ENGINE": "django.db.backends.sqlite3", "NAME": SHARED / "db.sqlite3", "OPTIONS": {"timeout": 20}}
}
CACHES = {"default": {"BACKEND": "django.core.cache.backends.filebased.FileBasedCache", "LOCATION": SHARED / "cache"}}
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]
REST_FRAMEWORK = {
    "DEFAULT_AUTHENTICATION_CLASSES": ["rest_framework.authentication.BasicAuthentication"],
    "DEFAULT_PERMISSION_CLASSES": ["rest_framework.permissions.IsAuthenticated"],
}
USE_TZ = True
