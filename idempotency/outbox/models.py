"""The table of messages, and its database."""

from __future__ import annotations

from typing import Any, ClassVar
from uuid import UUID

from django.db import models, router
from django.utils.translation import gettext_lazy as _

from ..conf import require_app
from ..models import BytewiseCharField, JSONTextField, Now, UnicodeTextField, UTCDateTimeField

require_app("idempotency.outbox")


class MessageStatus(models.TextChoices):
    """The state of a message of the outbox. The values are stored in the database."""

    PENDING = "pending", _("pending")  # waits until it is due, or is being sent under a relay's lease
    SENT = "sent", _("sent")  # confirmed by the broker
    DEAD = "dead", _("dead")  # tried too often; waits to be requeued


class OutboxMessage(models.Model):
    """A message that is published if the transaction that wrote it committed. See ``publishing.py``."""

    id: models.BigAutoField[int, int] = models.BigAutoField(primary_key=True)
    #: The message's identity at the broker, the same in every attempt of the operation that publishes it.
    message_id: models.UUIDField[UUID, UUID] = models.UUIDField(_("message id"), unique=True)
    #: The account of the operation that published it; empty if it was published outside a claim.
    account_id: BytewiseCharField = BytewiseCharField(_("account"), max_length=255, blank=True, default="")
    #: The key under which a consumer claims it.
    idempotency_key: BytewiseCharField = BytewiseCharField(_("key"), max_length=255)
    topic: BytewiseCharField = BytewiseCharField(_("topic"), max_length=255)
    #: The dotted path of the callable that sends it.
    sender: BytewiseCharField = BytewiseCharField(_("sender"), max_length=255)
    payload: JSONTextField = JSONTextField(_("payload"))
    headers: models.JSONField[Any, Any] = models.JSONField(_("headers"), default=dict, blank=True)
    status: models.CharField[str, str] = models.CharField(
        _("status"), max_length=8, choices=MessageStatus.choices, default=MessageStatus.PENDING
    )
    #: The number of tries to send it. Counted before a try, because the relay may die during it, and subtracted again
    #: if the try did not take place. A requeued message starts at 0.
    attempts: models.PositiveIntegerField[int, int] = models.PositiveIntegerField(_("attempts"), default=0)
    next_try_at: UTCDateTimeField = UTCDateTimeField(_("next try at"), db_default=Now())
    #: Until then, the relay that is sending it is presumed alive.
    lease_expires_at: UTCDateTimeField = UTCDateTimeField(_("lease ends at"), null=True, blank=True)
    error: UnicodeTextField = UnicodeTextField(_("last error"), blank=True, default="")
    created_at: UTCDateTimeField = UTCDateTimeField(_("created at"), db_default=Now())
    sent_at: UTCDateTimeField = UTCDateTimeField(_("sent at"), null=True, blank=True)

    objects: ClassVar[models.Manager[OutboxMessage]] = models.Manager()

    class Meta:
        db_table = "idempotency_outbox_message"
        verbose_name: ClassVar[Any] = _("outbox message")
        verbose_name_plural: ClassVar[Any] = _("outbox messages")
        indexes: ClassVar[list[models.Index]] = [
            # For the relay, the backlog and the admin. Ordered by due time and not by id, because a lower id may commit
            # after a higher one was sent.
            models.Index(
                fields=["status", "next_try_at"],
                condition=models.Q(status=MessageStatus.PENDING.value) | models.Q(status=MessageStatus.DEAD.value),
                name="idempotency_outbox_unsent",
            ),
            # For the purge.
            models.Index(
                fields=["sent_at"],
                condition=models.Q(status=MessageStatus.SENT.value),
                name="idempotency_outbox_sent",
            ),
        ]
        permissions: ClassVar[list[tuple[str, Any]]] = [
            ("view_payload", "Can view the payloads of messages"),
            ("requeue_outboxmessage", "Can requeue a dead message"),
        ]

    def __str__(self) -> str:
        return f"{self.topic} {self.message_id}: {self.status}"


def outbox_database() -> str:
    """The alias of the database that messages are written to by default."""
    return router.db_for_write(OutboxMessage)
