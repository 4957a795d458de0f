"""Settings of the sample project, from environment variables.

``DATABASE_URL`` names the database. The default is an SQLite file beside ``manage.py``.
"""

from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import environ

BASE_DIR = Path(__file__).resolve().parent.parent

env = environ.Env()

# Good enough for a sample. A real deployment sets its own key.
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
    "drf_spectacular",
    "idempotency",
    "idempotency.outbox",
    "idempotency.contrib.dashboard",
    # Without Celery, the sample runs but publishes nothing.
    *(["idempotency.contrib.celery"] if find_spec("celery") else []),
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
    options: dict[str, Any] = database.setdefault("OPTIONS", {})

    if database["ENGINE"] == "django.db.backends.sqlite3":
        # A deferred transaction that reads before it writes fails at once, regardless of its timeout, if another one
        # has written in between. IMMEDIATE takes the write lock first, so that the timeout (in seconds) applies.
        options.setdefault("transaction_mode", "IMMEDIATE")
        options.setdefault("timeout", 20)
        # With WAL, readers don't wait for the writer. `synchronous` stays FULL, so that acknowledged data survives a
        # power cut.
        options.setdefault("init_command", "PRAGMA journal_mode = WAL;")
        # The test database is a file, because threads and processes can't share one in memory.
        database["TEST"] = {"NAME": f"{database['NAME']}.test"}
        return database

    # A libpq URL names the Unix socket in its query. Django expects it in HOST.
    for name in ("host", "port"):
        if name in options:
            database[name.upper()] = options.pop(name)
    # asgi.py sets this to 0.
    database["CONN_MAX_AGE"] = env.int("CONN_MAX_AGE", default=60)
    database["CONN_HEALTH_CHECKS"] = True
    options.setdefault("connect_timeout", 5)
    return database


DATABASES = {"default": _database()}
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"

IDEMPOTENCY: dict[str, Any] = {}
if "IDEMPOTENCY_LEASE_SECONDS" in env:
    IDEMPOTENCY["LEASE"] = timedelta(seconds=env.float("IDEMPOTENCY_LEASE_SECONDS"))

REST_FRAMEWORK = {
    "DEFAULT_AUTHENTICATION_CLASSES": ["testproject.authentication.TokenAuthentication"],
    "DEFAULT_PERMISSION_CLASSES": ["rest_framework.permissions.IsAuthenticated"],
    "DEFAULT_PARSER_CLASSES": ["rest_framework.parsers.JSONParser"],
    "DEFAULT_RENDERER_CLASSES": ["rest_framework.renderers.JSONRenderer"],
    "DEFAULT_PAGINATION_CLASS": "rest_framework.pagination.PageNumberPagination",
    "PAGE_SIZE": 100,
    "TEST_REQUEST_DEFAULT_FORMAT": "json",
    "DEFAULT_SCHEMA_CLASS": "idempotency.contrib.spectacular.AutoSchema",
}

SPECTACULAR_SETTINGS = {"TITLE": "Sample payments API", "VERSION": "1", "SERVE_INCLUDE_SCHEMA": False}

# `python -m testproject.provider --ledger payouts.jsonl --port 8090` starts a stand-in for the provider. Payouts with
# REEXECUTE need a provider that deduplicates.
PROVIDER_URL = env.str("PROVIDER_URL", default="http://127.0.0.1:8090")
DEDUPLICATING_PROVIDER_URL = env.str("DEDUPLICATING_PROVIDER_URL", default=PROVIDER_URL)
# In seconds. Much shorter than the lease, so that a late response is still recorded in time.
PROVIDER_TIMEOUT = env.float("PROVIDER_TIMEOUT", default=5.0)

# `celery --app testproject worker` consumes the API's messages, for example with BROKER_URL=redis://127.0.0.1:6379/0 or
# BROKER_URL=amqp://guest:guest@127.0.0.1:5672//. Without a broker, messages stay in the outbox, and everything else
# works.
CELERY_BROKER_URL = env.str("BROKER_URL", default="amqp://guest:guest@127.0.0.1:5672//")
# `delay()` returns only after RabbitMQ has confirmed the message, even without the outbox.
CELERY_BROKER_TRANSPORT_OPTIONS: dict[str, Any] = {"confirm_publish": True}
if CELERY_BROKER_URL.startswith(("redis:", "rediss:", "redis+socket:", "sentinel:")):
    # Redis redelivers an unacknowledged message after this many seconds, which must be longer than any task takes.
    CELERY_BROKER_TRANSPORT_OPTIONS = {"visibility_timeout": env.int("BROKER_VISIBILITY_TIMEOUT", default=3600)}
CELERY_BROKER_CONNECTION_RETRY_ON_STARTUP = True
# Each worker process prefetches one message, so that waiting messages stay available to other workers.
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
    # Don't log every 4xx response, because clients retry.
    "loggers": {"django.request": {"level": "ERROR"}},
}
