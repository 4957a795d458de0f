"""A small payments API that shows how to use the package. The demo and the tests run it."""

try:
    from .celery import app as celery_app
except ModuleNotFoundError as error:
    # Without Celery, the sample runs but publishes nothing.
    if error.name != "celery":
        raise
else:
    __all__ = ["celery_app"]
