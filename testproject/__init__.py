"""A small payments API that shows how to use the package. The demo and the tests run it."""

try:
    from .celery import app as celery_app
except ModuleNotFoundError as error:
    # The sample also runs without Celery. Then it publishes nothing.
    if error.name != "celery":
        raise
else:
    __all__ = ["celery_app"]
