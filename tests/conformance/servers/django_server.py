"""A Django project with one operation, protected by the package that ``PACKAGE`` names. Served by gunicorn.

Each package has its documented defaults, except for the settings below and those in ``compare.py``.
"""

import os
from pathlib import Path

import django
from django.conf import settings
from django.http import HttpResponse, JsonResponse
from django.urls import path
from operation import run

PACKAGE = os.environ["PACKAGE"]
DATA = Path(os.environ["EFFECTS"]).parent

APPS = {"django-idempotency": ["idempotency"], "drf-idempotency": ["drf_idempotency"]}
APPS |= {"drf-idem": ["drf_idem"], "drf-idempotencykey": ["drf_idempotencykey"]}
APPS["djangorestframework-idempotency-key"] = ["rest_framework_idempotency_key"]
MIDDLEWARE = {
    "django-idempotency-key": ["idempotency_key.middleware.ExemptIdempotencyKeyMiddleware"],
    "drf-idem": ["drf_idem.middleware.IdempotencyMiddleware"],
    "drf-idempotency": ["drf_idempotency.middleware.IdempotencyMiddleware"],
    "djangorestframework-idempotency-key": ["rest_framework_idempotency_key.middleware.IdempotencyKeyMiddleware"],
}
if PACKAGE == "django-idempotency":
    own = {"IDEMPOTENCY": {"ACCOUNT": "django_server.account"}}
elif PACKAGE == "django-idempotency-key":
    cached = "Cache" if os.environ.get("STORE") == "file" else "Memory"
    # Replays get the status of the first answer. By default they get 409.
    own = {
        "IDEMPOTENCY_KEY": {
            "CONFLICT_STATUS_CODE": None,
            "STORAGE": {"CLASS": f"idempotency_key.storage.{cached}KeyStorage"},
        }
    }
else:
    own = {"IDEMPOTENCY_KEY_LOCK_TIMEOUT": 60}

settings.configure(
    SECRET_KEY="comparison",
    ALLOWED_HOSTS=["*"],
    ROOT_URLCONF="django_server",
    INSTALLED_APPS=["django.contrib.contenttypes", "django.contrib.auth", "rest_framework", *APPS.get(PACKAGE, [])],
    MIDDLEWARE=MIDDLEWARE.get(PACKAGE, []),
    DATABASES={
        "default": {
            "ENGINE": "django.db.backends.sqlite3",
            "NAME": DATA / "db.sqlite3",
            "OPTIONS": {"timeout": 20, "transaction_mode": "IMMEDIATE", "init_command": "PRAGMA journal_mode = WAL;"},
        }
    },
    CACHES={
        "default": {"BACKEND": "django.core.cache.backends.filebased.FileBasedCache", "LOCATION": str(DATA / "cache")},
        "drf_idem": {
            "BACKEND": "django.core.cache.backends.redis.RedisCache",
            "LOCATION": os.environ.get("REDIS", "unix://"),
        },
    },
    REST_FRAMEWORK={"DEFAULT_AUTHENTICATION_CLASSES": [], "UNAUTHENTICATED_USER": None},
    USE_TZ=True,
    **own,
)
django.setup()


def account(request):
    return request.headers.get("Authorization")


def answer(request):
    try:
        status, name = run(request.body)
    except ValueError:
        return HttpResponse("not JSON", status=400)
    return JsonResponse({"run": name}, status=status)


if PACKAGE == "django-idempotency":
    from idempotency import PARK, idempotent

    def protect(name):
        return idempotent(name, transaction=False, recovery=PARK)(answer)

elif PACKAGE == "django-idempotency-key":
    from idempotency_key.decorators import idempotency_key

    def protect(name):
        return idempotency_key()(answer)

else:
    from rest_framework.response import Response
    from rest_framework.views import APIView

    def post(self, request):
        try:
            status, name = run(request.body)
        except ValueError:
            return Response("not JSON", status=400)
        return Response({"run": name}, status=status)

    parents, options = [APIView], {}
    if PACKAGE == "drf-idempotencykey":
        from django.contrib.auth.models import User
        from drf_idempotencykey.mixins import DrfIdempotencyKeyMixin
        from rest_framework.authentication import BaseAuthentication

        class Named(BaseAuthentication):
            """The user whose name is the whole header."""

            def authenticate(self, request):
                name = account(request)
                return name and (User.objects.get_or_create(username=name)[0], None)

        parents.insert(0, DrfIdempotencyKeyMixin)
        options["authentication_classes"] = [Named]
    if PACKAGE == "djangorestframework-idempotency-key":
        from rest_framework_idempotency_key.decorators import simple_idempotency_key_method

        post = simple_idempotency_key_method(post)
    Operation = type("Operation", tuple(parents), {"post": post, **options})

    def protect(name):
        return Operation.as_view()


urlpatterns = [path("charges", protect("charges")), path("refunds", protect("refunds"))]

if __name__ == "__main__":
    from django.core.management import call_command

    call_command("migrate", verbosity=0)
else:
    from django.core.wsgi import get_wsgi_application

    application = get_wsgi_application()
