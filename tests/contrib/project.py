"""A project for a separate process: its arguments name its apps, and its database is in the current directory."""

PROJECT = """
import django, json, sys
from django.conf import settings

settings.configure(
    SECRET_KEY="tests",
    INSTALLED_APPS=[
        *(f"django.contrib.{name}" for name in ("admin", "auth", "contenttypes", "messages", "sessions")),
        "idempotency", *sys.argv[1:],
    ],
    MIDDLEWARE=[
        "django.contrib.sessions.middleware.SessionMiddleware",
        "django.contrib.auth.middleware.AuthenticationMiddleware",
        "django.contrib.messages.middleware.MessageMiddleware",
    ],
    TEMPLATES=[{
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "APP_DIRS": True,
        "OPTIONS": {"context_processors": [
            "django.template.context_processors.request",
            "django.contrib.auth.context_processors.auth",
            "django.contrib.messages.context_processors.messages",
        ]},
    }],
    ROOT_URLCONF="__main__",
    STATIC_URL="static/",
    ALLOWED_HOSTS=["testserver"],
    DATABASES={"default": {
        "ENGINE": "django.db.backends.sqlite3", "NAME": "db.sqlite3", "OPTIONS": {"transaction_mode": "IMMEDIATE"},
    }},
    DEFAULT_AUTO_FIELD="django.db.models.BigAutoField",
    USE_TZ=True,
)
django.setup()
from django.contrib import admin
from django.core.management import call_command, get_commands
from django.db import connection
from django.urls import path

urlpatterns = [path("admin/", admin.site.urls)]
call_command("migrate", verbosity=0)
"""
