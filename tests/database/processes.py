"""Separate processes on the test's database. They load Django's settings, but no URLconf."""

import os
import subprocess
import sys
from urllib.parse import urlsplit

from django.conf import settings
from django.db import connection


def environment():
    """Environment variables with which the settings name the test database instead of the default one."""
    name = str(connection.settings_dict["NAME"])
    if connection.vendor == "sqlite":
        url = f"sqlite:///{name}"
    else:
        url = urlsplit(os.environ["DATABASE_URL"])._replace(path=f"/{name}").geturl()
    return {**os.environ, "DATABASE_URL": url, "DJANGO_SETTINGS_MODULE": os.environ["DJANGO_SETTINGS_MODULE"]}


def start(script, *arguments, **more):
    return subprocess.Popen(
        [sys.executable, "-c", script, *arguments],
        cwd=settings.BASE_DIR,
        env={**environment(), **more.pop("env", {})},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **more,
    )
