"""Records each decision with its author: in the log ``idempotency.audit``, and in that of the admin if there is one."""

from __future__ import annotations

import logging
from typing import Any, Final

from django.apps import apps
from django.contrib.auth import get_user_model
from django.db import transaction
from django.db.models import Model

logger: Final = logging.getLogger("idempotency.audit")


def require_name(by: Any) -> None:
    """:raises TypeError: ``by`` does not say who decides."""
    if not isinstance(by, Model) and not (isinstance(by, str) and by):
        raise TypeError(f"by= must name who decides: a user, or a str that is not empty, not {by!r}.")


def record(row: Model, subject: str, title: str, decision: str, by: Any, reason: str, *, using: str) -> None:
    """Record a decision in the transaction that carries it out.

    The admin's log, which the row's history shows, gets an entry if the admin is installed and ``by`` is a user of
    ``AUTH_USER_MODEL``. The log ``idempotency.audit`` gets a line after the COMMIT.

    :param subject: the row, for the line. It has no control characters and no line breaks.
    :param title: the row, for the entry.
    :param using: the alias of the database of the transaction.
    """

    def write_line() -> None:
        # People choose the name and the reason freely. repr() escapes them, so they can't break the line or forge one.
        logger.info("%s: %s by %r, reason: %r", subject, decision, str(by), reason)

    transaction.on_commit(write_line, using=using, robust=True)
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
