"""The tables: records, steps, the outbox, counters. Statements that decide ownership live in ``claims.py``."""

from __future__ import annotations

from typing import Any, ClassVar
from uuid import UUID

from django.db import models
from django.db.models.functions import Now
from django.utils.translation import gettext_lazy as _

from .identity.scope import Scope
from .lifecycle import Status


class BytewiseCharField(models.CharField):  # type: ignore[type-arg]
    """Text of which two values are equal only if their bytes are.

    MySQL and MariaDB compare by a collation that folds case, accents and trailing spaces unless told otherwise. On
    PostgreSQL equality is bytewise already, but an index in a locale's order is corrupted by an upgrade of the C
    library that changes the order, and a unique index that misses a row lets a second claim through: "C" never moves.
    """

    def db_parameters(self, connection: Any) -> Any:
        parameters = super().db_parameters(connection)
        if connection.vendor == "postgresql":
            parameters["collation"] = "C"
        elif connection.vendor == "mysql":
            parameters["collation"] = "utf8mb4_nopad_bin" if connection.mysql_is_mariadb else "utf8mb4_0900_bin"
        return parameters


class JSONTextField(models.TextField):  # type: ignore[type-arg]
    """JSON kept as the exact text it was given, and read back as that text.

    PostgreSQL's ``json`` keeps the text and checks its syntax; ``jsonb`` would lose key order, spacing and the form of
    numbers. Elsewhere it is a text column.
    """

    def db_type(self, connection: Any) -> str | None:
        return "json" if connection.vendor == "postgresql" else super().db_type(connection)

    def select_format(self, compiler: Any, sql: str, params: Any) -> tuple[str, Any]:
        # Drivers parse a json column into Python objects, and the text would be gone.
        return (f"{sql}::text" if compiler.connection.vendor == "postgresql" else sql), params


_STATUSES = [
    (Status.IN_PROGRESS.value, _("in progress")),
    (Status.COMPLETED.value, _("completed")),
    (Status.RECOVERABLE.value, _("recoverable")),
    (Status.PARKED.value, _("parked")),
]


class RecordQuerySet(models.QuerySet["IdempotencyRecord"]):
    """Records in the words of the design. Every time is the database's."""

    def in_scope(self, account_id: str, operation: str, idempotency_key: str) -> RecordQuerySet:
        return self.filter(account_id=account_id, operation=operation, idempotency_key=idempotency_key)

    def in_progress(self) -> RecordQuerySet:
        return self.filter(status=Status.IN_PROGRESS)

    def completed(self) -> RecordQuerySet:
        return self.filter(status=Status.COMPLETED)

    def recoverable(self) -> RecordQuerySet:
        return self.filter(status=Status.RECOVERABLE)

    def parked(self) -> RecordQuerySet:
        return self.filter(status=Status.PARKED)

    def live(self) -> RecordQuerySet:
        """Claims whose lease runs."""
        return self.in_progress().filter(lease_expires_at__gt=Now())

    def abandoned(self) -> RecordQuerySet:
        """Claims whose lease is over: their process is gone, or slower than it promised."""
        return self.in_progress().filter(lease_expires_at__lte=Now())

    def past_retention(self) -> RecordQuerySet:
        return self.filter(expires_at__lte=Now())


class IdempotencyRecord(models.Model):
    """One logical operation: who asked for what under which key, who owns it now, and how it ended."""

    id = models.BigAutoField(primary_key=True)
    account_id = BytewiseCharField(_("account"), max_length=255)
    operation = BytewiseCharField(_("operation"), max_length=255)
    idempotency_key = BytewiseCharField(_("key"), max_length=255)
    request_hash = models.CharField(_("payload's fingerprint"), max_length=128)
    status = models.CharField(_("status"), max_length=16, choices=_STATUSES)
    #: The fencing number: 1 at the first claim, +1 at every further one, never reset.
    attempt = models.PositiveIntegerField(_("attempt"), default=1)
    response_status = models.PositiveSmallIntegerField(_("response status"), null=True, blank=True)
    #: A list of [name, value] pairs, so that a repeated header keeps its place.
    response_headers = models.JSONField(_("response headers"), null=True, blank=True)
    response_body = JSONTextField(_("response body"), null=True, blank=True)
    response_reference = models.TextField(  # noqa: DJ001 - null is "none", "" is a reference
        _("response reference"), null=True, blank=True
    )
    lease_expires_at = models.DateTimeField(_("lease ends at"), null=True, blank=True)
    expires_at = models.DateTimeField(_("retention ends at"), db_index=True)
    created_at = models.DateTimeField(_("created at"), db_default=Now())
    completed_at = models.DateTimeField(_("completed at"), null=True, blank=True)

    objects: ClassVar[models.Manager[IdempotencyRecord]] = RecordQuerySet.as_manager()

    class Meta:
        db_table = "idempotency_record"
        verbose_name = _("idempotency record")
        verbose_name_plural = _("idempotency records")
        constraints: ClassVar = [
            # account_id leads: it is the distribution key of a partitioned table, and it names one caller's records.
            models.UniqueConstraint(
                fields=["account_id", "operation", "idempotency_key"], name="idempotency_record_scope"
            ),
        ]
        indexes: ClassVar = [
            # What recovery, the statistics and the admin look for is a handful of rows among millions of completed
            # ones. No B-tree that finds them lets the completing update stay heap-only. A BRIN does, but comes to match
            # every page once purged pages are used again: docs/explanation/benchmarks.md has the figures. An OR of
            # equalities and not an IN, so that SQLite too sees that each of the three states is covered.
            models.Index(
                fields=["status", "lease_expires_at"],
                condition=models.Q(status=Status.IN_PROGRESS.value)
                | models.Q(status=Status.RECOVERABLE.value)
                | models.Q(status=Status.PARKED.value),
                name="idempotency_record_unfinished",
            ),
        ]
        permissions: ClassVar = [
            ("view_response_body", "Can view recorded response bodies"),
            ("resolve_idempotencyrecord", "Can say how a parked operation ended"),
            ("release_idempotencyrecord", "Can release a claim so that a retry runs"),
        ]

    def __repr__(self) -> str:
        # Without the account: a crash report shows the repr of whatever stands in a local variable.
        return f"<{type(self).__name__} {self.pk} of operation {self.operation!r}: {self.status}>"

    def __str__(self) -> str:
        return f"{self.operation} of account {self.account_id}, attempt {self.attempt}: {self.status}"

    @property
    def scope(self) -> Scope:
        return Scope(self.account_id, self.operation, self.idempotency_key)

    def derive_key(self, name: str) -> UUID:
        """The key that the operation's claims derive for the call ``name``: what a reconciler asks a provider for."""
        return self.scope.derive_key(name)

    def derive_text(self, name: str, length: int = 32) -> str:
        """The same as ``length`` hexadecimal digits, 16 to 64."""
        return self.scope.derive_text(name, length)


class IdempotencyStep(models.Model):
    """The result of one finished phase of an operation. Purged with its record."""

    id = models.BigAutoField(primary_key=True)
    account_id = BytewiseCharField(_("account"), max_length=255)
    #: Not a foreign key: its check would cost every deletion a look-up, and a distributed table can't enforce it.
    record_id = models.BigIntegerField(_("record"))
    name = BytewiseCharField(_("name"), max_length=255)
    result = JSONTextField(_("result"))
    created_at = models.DateTimeField(_("created at"), db_default=Now())

    objects: ClassVar[models.Manager[IdempotencyStep]] = models.Manager()

    class Meta:
        db_table = "idempotency_step"
        verbose_name = _("step")
        verbose_name_plural = _("steps")
        constraints: ClassVar = [
            models.UniqueConstraint(fields=["account_id", "record_id", "name"], name="idempotency_step_name"),
        ]

    def __str__(self) -> str:
        return f"{self.name} of record {self.record_id}"


class MessageStatus(models.TextChoices):
    """What has become of a message of the outbox. The values are what the database holds."""

    PENDING = "pending", _("pending")  # to be sent once it is due, or being sent while a relay's lease runs
    SENT = "sent", _("sent")  # the broker has confirmed it
    DEAD = "dead", _("dead")  # tried often enough; waits for somebody to requeue it


class OutboxMessage(models.Model):
    """A message that is to be published because a transaction committed. See ``outbox.py``."""

    id = models.BigAutoField(primary_key=True)
    #: The same on every attempt of the operation that publishes it, and the message's identity at the broker.
    message_id = models.UUIDField(_("message id"), unique=True)
    #: Whose operation it belongs to; empty if it was published outside of one.
    account_id = BytewiseCharField(_("account"), max_length=255, blank=True, default="")
    #: The key under which a consumer claims it.
    idempotency_key = BytewiseCharField(_("key"), max_length=255)
    topic = models.CharField(_("topic"), max_length=255)
    #: The dotted path of what hands it to a broker.
    sender = models.CharField(_("sender"), max_length=255)
    payload = JSONTextField(_("payload"))
    headers = models.JSONField(_("headers"), default=dict, blank=True)
    #: Messages with one ordering key are sent in the order in which they were written; empty asks for no order.
    ordering_key = BytewiseCharField(_("ordering key"), max_length=255, blank=True, default="")
    status = models.CharField(_("status"), max_length=8, choices=MessageStatus.choices, default=MessageStatus.PENDING)
    #: How often a relay has tried, or may have: counted before the try, because a relay can die in it. A count and not
    #: a fencing number: a try that did not take place is taken off again, and a requeued message starts at 0.
    attempts = models.PositiveIntegerField(_("attempts"), default=0)
    next_try_at = models.DateTimeField(_("next try at"), db_default=Now())
    #: Until when a relay that is sending it is presumed alive.
    lease_expires_at = models.DateTimeField(_("lease ends at"), null=True, blank=True)
    error = models.TextField(_("last error"), blank=True, default="")
    created_at = models.DateTimeField(_("created at"), db_default=Now())
    sent_at = models.DateTimeField(_("sent at"), null=True, blank=True)

    objects: ClassVar[models.Manager[OutboxMessage]] = models.Manager()

    class Meta:
        db_table = "idempotency_outbox"
        verbose_name = _("outbox message")
        verbose_name_plural = _("outbox messages")
        indexes: ClassVar = [
            # What a relay, the backlog and the admin look for, among many that are sent and not purged yet. By due time
            # and never by id: a lower id may commit after a higher one was sent.
            models.Index(
                fields=["status", "next_try_at"],
                condition=models.Q(status=MessageStatus.PENDING.value) | models.Q(status=MessageStatus.DEAD.value),
                name="idempotency_outbox_unsent",
            ),
            # What comes before a message in its order.
            models.Index(
                fields=["ordering_key", "id"],
                condition=~models.Q(ordering_key="") & ~models.Q(status=MessageStatus.SENT.value),
                name="idempotency_outbox_order",
            ),
            # What a purge looks for.
            models.Index(
                fields=["sent_at"],
                condition=models.Q(status=MessageStatus.SENT.value),
                name="idempotency_outbox_sent",
            ),
        ]
        permissions: ClassVar = [
            ("view_payload", "Can view the payloads of messages"),
            ("requeue_outboxmessage", "Can requeue a dead message"),
        ]

    def __str__(self) -> str:
        return f"{self.topic} {self.message_id}: {self.status}"


class IdempotencyCounter(models.Model):
    """How often something happened to an operation's records, added up over all processes. See ``counters.py``."""

    id = models.BigAutoField(primary_key=True)
    operation = BytewiseCharField(_("operation"), max_length=255)
    #: The name of the signal that is counted.
    event = BytewiseCharField(_("event"), max_length=32)
    total = models.BigIntegerField(_("total"), default=0)

    objects: ClassVar[models.Manager[IdempotencyCounter]] = models.Manager()

    class Meta:
        db_table = "idempotency_counter"
        verbose_name = _("counter")
        verbose_name_plural = _("counters")
        constraints: ClassVar = [
            models.UniqueConstraint(fields=["operation", "event"], name="idempotency_counter_event"),
        ]

    def __str__(self) -> str:
        return f"{self.operation} {self.event}: {self.total}"
