"""The sample project is also an app, because it contains models and commands."""

from django.apps import AppConfig


class SampleProjectConfig(AppConfig):
    name = "testproject"
    verbose_name = "Sample payments API"
    default_auto_field = "django.db.models.BigAutoField"
