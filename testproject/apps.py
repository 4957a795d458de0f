"""The sample project is an app too, for its models and commands."""

from __future__ import annotations

from django.apps import AppConfig


class SampleProjectConfig(AppConfig):
    name = "testproject"
    verbose_name = "Sample payments API"
    default_auto_field = "django.db.models.BigAutoField"
