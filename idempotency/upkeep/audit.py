"""Who has decided what: the log ``idempotency.audit``, and an entry in the admin's own log where there is one."""

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
        raise TypeError(f"by= names who decides: a user, or a str that is not empty, not {by!r}.")


def note(subject: str, decision: str, by: Any, reason: str) -> None:
    """Leave a line in the log.

    :param subject: what was decided on, made of text that can't hold a control character or a line break.
    """
    # A user may choose the own name, and a person the reason: as literals, neither can break the line or forge a part.
    logger.info("%s: %s by %r, reason: %r", subject, decision, str(by), reason)


def enter(row: Model, title: str, decision: str, by: Any, reason: str) -> None:
    """Leave an entry in the admin's log, which the row's history shows, if a user decided and there is such a log."""
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
