"""One section of the admin index for the models of all the package's apps. Django shows one section per app."""

from __future__ import annotations

from functools import wraps
from typing import Any, Final

from django.contrib.admin import AdminSite
from django.http import HttpRequest

FIRST: Final = "idempotency"
LABELS: Final = (FIRST, "idempotency_outbox", "idempotency_dashboard")


def join_sections(site: AdminSite) -> None:
    """Join the package's sections in the site's ``get_app_list``.

    The site is patched, not replaced, because a project may use a custom site class.
    """
    get_app_list = site.get_app_list

    @wraps(get_app_list)
    def joined(request: HttpRequest, app_label: str | None = None) -> list[Any]:
        if app_label not in {None, FIRST}:
            return get_app_list(request, app_label)
        sections = get_app_list(request)
        own = [section for section in sections if section["app_label"] in LABELS]
        own.sort(key=lambda section: LABELS.index(section["app_label"]))
        for section in own[1:]:
            own[0]["models"] = sorted([*own[0]["models"], *section["models"]], key=lambda model: model["name"])
        return own[:1] if app_label else [section for section in sections if section not in own[1:]]

    site.get_app_list = joined  # type: ignore[method-assign]
