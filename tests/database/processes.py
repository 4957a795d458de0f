"""Processes of their own on the test's database, which know nothing but Django's settings and no URLconf."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any
from urllib.parse import quote

from django.conf import settings
from django.db import connection


def environment() -> dict[str, str]:
    """The environment in which the settings name the database of the tests, and not the one beside it."""
    database = connection.settings_dict
    if connection.vendor == "sqlite":
        url = f"sqlite:///{database['NAME']}"
    else:
        user, password, name = (quote(str(database[part]), safe="") for part in ("USER", "PASSWORD", "NAME"))
        host, port = quote(database["HOST"], safe=""), database["PORT"]
        if connection.vendor == "mysql":
            url = f"mysql://{user}:{password}@{host}:{port or 3306}/{name}"
        else:
            url = f"postgres://{user}:{password}@/{name}?host={host}&port={port or 5432}"
    return {**os.environ, "DATABASE_URL": url, "DJANGO_SETTINGS_MODULE": os.environ["DJANGO_SETTINGS_MODULE"]}


def start(script: str, *arguments: str, **more: Any) -> subprocess.Popen[str]:
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
