"""Records each decision with its author: in the log ``idempotency.audit``, and in that of the admin if there is one."""

from __future__ import annotations

import logging
from typing import Any

from django.apps import apps
from django.contrib.auth import get_user_model
from django.db.models import Model

logger = logging.getLogger("idempotency.audit")


def require_name(by: Any) -> None:
    """:raises TypeError: ``by`` does not say who decides."""
    if not isinstance(by, Model) and not (isinstance(by, str) and by):
        raise TypeError(f"by= must name who decides: a user, or a str that is not empty, not {by!r}.")


def note(subject: str, decision: str, by: Any, reason: str) -> None:
    """Write a line to the log ``idempotency.audit``.

    :param subject: the row. The caller makes sure that it has no control characters and no line breaks.
    """
    # People choose the name and the reason freely. repr() escapes them, so they can't break the line or forge a part.
    logger.info("%s: %s by %r, reason: %r", subject, decision, str(by), reason)


def enter(row: Model, title: str, decision: str, by: Any, reason: str) -> None:
    """Add an entry to the admin's log, which the row's history shows.

    Does nothing if the admin is not installed or if ``by`` is not a user of ``AUTH_USER_MODEL``.
    """
    if not apps.is_installed("django.contrib.admin") or not isinstance(by, get_user_model()):
        return
    from django.contrib.admin.models import CHANGE, LogEntry
    from django.contrib.contenttypes.models import ContentType

    LogEntry.objects.create(
        user_id=by.pk,
        content_type=ContentType.objects.get_for_model(row),
        object_id=str(row.pk),
        object_repr=title[:200],
        action_flag=CHANGE,
        change_message=f"{decision}: {reason}" if reason else decision,
    )
