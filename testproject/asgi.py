"""The sample project for an ASGI server."""

import os

from django.core.asgi import get_asgi_application

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "testproject.settings")
# Each request runs in its own thread, so a persistent connection would be lost at the end of the request.
os.environ.setdefault("CONN_MAX_AGE", "0")

application = get_asgi_application()
