"""Settings of the sample project, each of them set by the environment.

``DATABASE_URL`` decides the database. Without it SQLite serves, in a file beside ``manage.py``.
"""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import environ

BASE_DIR = Path(__file__).resolve().parent.parent

env = environ.Env()

# Good enough for a sample that holds nobody's money. A deployment sets its own.
SECRET_KEY = env.str("SECRET_KEY", default="insecure-key-of-the-sample-project")
DEBUG = env.bool("DEBUG", default=False)
ALLOWED_HOSTS = env.list("ALLOWED_HOSTS", default=["localhost", "127.0.0.1", "[::1]"])

INSTALLED_APPS = [
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.messages",
    "django.contrib.sessions",
    "django.contrib.staticfiles",
    "rest_framework",
    "rest_framework.authtoken",
    "idempotency",
    "testproject",
]

MIDDLEWARE = [
    "django.middleware.security.SecurityMiddleware",
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
]

ROOT_URLCONF = "testproject.urls"
WSGI_APPLICATION = "testproject.wsgi.application"
ASGI_APPLICATION = "testproject.asgi.application"

TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
            ],
        },
    }
]


def _database() -> dict[str, Any]:
    """The default database, from ``DATABASE_URL``."""
    database: dict[str, Any] = dict(env.db_url("DATABASE_URL", default=f"sqlite:///{BASE_DIR / 'db.sqlite3'}"))
    database["ATOMIC_REQUESTS"] = env.bool("ATOMIC_REQUESTS", default=False)
    options: dict[str, Any] = database.setdefault("OPTIONS", {})

    if database["ENGINE"] == "django.db.backends.sqlite3":
        # A transaction that reads before it writes fails at once, whatever its timeout, if another has written in
        # between. IMMEDIATE takes the write lock first, and then the timeout (seconds) holds.
        options.setdefault("transaction_mode", "IMMEDIATE")
        options.setdefault("timeout", 20)
        # Readers don't wait for the writer. `synchronous` stays at FULL: what was acknowledged survives a power cut.
        options.setdefault("init_command", "PRAGMA journal_mode = WAL;")
        # Threads and processes share the test database, which they can't do in memory.
        database["TEST"] = {"NAME": f"{database['NAME']}.test"}
        return database

    # libpq's own form of a URL names a Unix socket in the query. Django wants it where it looks for the host.
    for name in ("host", "port"):
        if name in options:
            database[name.upper()] = options.pop(name)
    # asgi.py lowers this to 0, for there a connection belongs to one request's thread.
    database["CONN_MAX_AGE"] = env.int("CONN_MAX_AGE", default=60)
    database["CONN_HEALTH_CHECKS"] = True
    options.setdefault("connect_timeout", 5)
    return database


DATABASES = {"default": _database()}
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"

IDEMPOTENCY: dict[str, Any] = {
    name: timedelta(seconds=env.float(variable))
    for name, variable in {"LEASE": "IDEMPOTENCY_LEASE_SECONDS", "TTL": "IDEMPOTENCY_TTL_SECONDS"}.items()
    if variable in env
}

REST_FRAMEWORK = {
    "DEFAULT_AUTHENTICATION_CLASSES": ["testproject.authentication.TokenAuthentication"],
    "DEFAULT_PERMISSION_CLASSES": ["rest_framework.permissions.IsAuthenticated"],
    "DEFAULT_PARSER_CLASSES": ["testproject.payloads.StrictJSONParser"],
    "DEFAULT_RENDERER_CLASSES": ["rest_framework.renderers.JSONRenderer"],
    "DEFAULT_PAGINATION_CLASS": "rest_framework.pagination.PageNumberPagination",
    "PAGE_SIZE": 100,
    "TEST_REQUEST_DEFAULT_FORMAT": "json",
}

# How long, in seconds, a charge pretends to talk to a card network, half of it before its effect and half after. The
# demo sets it, so that a cut connection or a killed worker meets requests on both sides of the effect.
PROCESSING_SECONDS = env.float("PROCESSING_SECONDS", default=0.0)

# The payment provider: `python -m testproject.provider --ledger payouts.jsonl --port 8090` is a stand-in. Payouts that
# are simply made again after a crash need one that deduplicates.
PROVIDER_URL = env.str("PROVIDER_URL", default="http://127.0.0.1:8090")
DEDUPLICATING_PROVIDER_URL = env.str("DEDUPLICATING_PROVIDER_URL", default=PROVIDER_URL)
# Seconds. Far below the lease, so that an answer that comes at the last moment is still recorded in time.
PROVIDER_TIMEOUT = env.float("PROVIDER_TIMEOUT", default=5.0)

# `celery --app testproject worker` consumes what the API publishes, for example with
# BROKER_URL=redis://127.0.0.1:6379/0 or BROKER_URL=amqp://guest:guest@127.0.0.1:5672//. Without a broker messages stay
# in the outbox, and everything else works.
CELERY_BROKER_URL = env.str("BROKER_URL", default="amqp://guest:guest@127.0.0.1:5672//")
CELERY_RESULT_BACKEND = env.str("RESULT_BACKEND", default=None)
CELERY_TASK_ALWAYS_EAGER = env.bool("CELERY_TASK_ALWAYS_EAGER", default=False)
# What is published without the outbox, too, is known to have reached RabbitMQ when `delay()` returns.
CELERY_BROKER_TRANSPORT_OPTIONS: dict[str, Any] = {"confirm_publish": True}
if CELERY_BROKER_URL.startswith(("redis:", "rediss:", "redis+socket:", "sentinel:")):
    # Seconds after which Redis delivers a message again that nobody has acknowledged. Longer than any task takes.
    CELERY_BROKER_TRANSPORT_OPTIONS = {"visibility_timeout": env.int("BROKER_VISIBILITY_TIMEOUT", default=3600)}
CELERY_BROKER_CONNECTION_RETRY_ON_STARTUP = True
# One message at a time, so that those that wait are free for other workers.
CELERY_WORKER_PREFETCH_MULTIPLIER = 1

LANGUAGE_CODE = "en-us"
TIME_ZONE = "UTC"
USE_I18N = False
USE_TZ = True
STATIC_URL = "static/"

LOGGING = {
    "version": 1,
    "disable_existing_loggers": False,
    "handlers": {"console": {"class": "logging.StreamHandler"}},
    "root": {"handlers": ["console"], "level": env.str("LOG_LEVEL", default="WARNING")},
    # A refused request is no news for an API whose clients retry.
    "loggers": {"django.request": {"level": "ERROR"}},
}
