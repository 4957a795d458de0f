"""The tables: records, steps, the outbox, counters. The statements that decide who owns a record are in ``sql/``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar
from uuid import UUID

from django.db import models
from django.db.models.functions import Now
from django.utils.translation import gettext_lazy as _

from .identity.scope import Scope
from .lifecycle import Status


class BytewiseCharField(models.CharField):  # type: ignore[type-arg]
    """Text whose values are equal only if their bytes are equal.

    By default, MySQL and MariaDB ignore case, accents and trailing spaces in comparisons. PostgreSQL compares bytes,
    but sorts an index in the order of the locale. If an upgrade of the C library changes that order, the index is
    corrupt, and a unique index that misses a row lets a second claim through. The order of the collation "C" never
    changes.
    """

    def db_parameters(self, connection: Any) -> Any:
        parameters = super().db_parameters(connection)
        if connection.vendor == "postgresql":
            parameters["collation"] = "C"
        elif connection.vendor == "mysql":
            parameters["collation"] = "utf8mb4_nopad_bin" if connection.mysql_is_mariadb else "utf8mb4_0900_bin"
        return parameters


class UnicodeTextField(models.TextField):  # type: ignore[type-arg]
    """Text of any characters. MySQL and MariaDB may have databases whose character set doesn't have all of them."""

    def db_parameters(self, connection: Any) -> Any:
        parameters = super().db_parameters(connection)
        if connection.vendor == "mysql":
            parameters["collation"] = "utf8mb4_bin"
        return parameters


class JSONTextField(UnicodeTextField):
    """JSON that is stored and read as its exact text.

    On PostgreSQL its type is ``json``, which keeps the text and checks its syntax. ``jsonb`` would lose the order of
    names, the white space and the form of numbers. On other databases it is a text column.
    """

    def db_type(self, connection: Any) -> str | None:
        return "json" if connection.vendor == "postgresql" else super().db_type(connection)

    def select_format(self, compiler: Any, sql: str, params: Any) -> tuple[str, Any]:
        # Without the cast, the driver parses the column into Python objects and the exact text is lost.
        return (f"{sql}::text" if compiler.connection.vendor == "postgresql" else sql), params


class PartialIndex(models.Index):
    """An index with a condition. A database without partial indexes gets one of other columns in its place.

    MySQL and MariaDB ignore the condition. The index would then hold every record, and the updates of a record would
    lock others in it.

    :param otherwise: the columns of the index on a database without partial indexes.
    """

    def __init__(self, *, otherwise: Sequence[str], **options: Any) -> None:
        super().__init__(**options)
        self.otherwise = otherwise

    def deconstruct(self) -> Any:
        path, expressions, options = super().deconstruct()
        return path, expressions, {**options, "otherwise": self.otherwise}

    def create_sql(self, model: Any, schema_editor: Any, using: str = "", **options: Any) -> Any:
        if schema_editor.connection.features.supports_partial_indexes:
            return super().create_sql(model, schema_editor, using=using, **options)
        return models.Index(fields=self.otherwise, name=self.name).create_sql(model, schema_editor, using, **options)


_STATUSES = [
    (Status.IN_PROGRESS.value, _("in progress")),
    (Status.COMPLETED.value, _("completed")),
    (Status.RECOVERABLE.value, _("recoverable")),
    (Status.PARKED.value, _("parked")),
]


class RecordQuerySet(models.QuerySet["IdempotencyRecord"]):
    """Queries for records by scope and state. Every time is compared by the database's clock."""

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
        """Claims whose lease is running."""
        return self.in_progress().filter(lease_expires_at__gt=Now())

    def abandoned(self) -> RecordQuerySet:
        """Claims whose lease is over: their process is gone, or needs more time than its lease."""
        return self.in_progress().filter(lease_expires_at__lte=Now())

    def past_retention(self) -> RecordQuerySet:
        return self.filter(expires_at__lte=Now())

    def with_body_past_retention(self) -> RecordQuerySet:
        """Records that a purge takes the response from. Only a completed record has one."""
        return self.completed().filter(body_expires_at__lte=Now())


class IdempotencyRecord(models.Model):
    """One logical operation: who asked for what under which key, who owns it now, and how it ended."""

    id = models.BigAutoField(primary_key=True)
    account_id = BytewiseCharField(_("account"), max_length=255)
    operation = BytewiseCharField(_("operation"), max_length=255)
    idempotency_key = BytewiseCharField(_("key"), max_length=255)
    request_hash = models.CharField(_("payload's fingerprint"), max_length=128)
    status = models.CharField(_("status"), max_length=16, choices=_STATUSES)
    #: The fencing number: 1 at the first claim, plus 1 at every later claim, never reset.
    attempt = models.PositiveIntegerField(_("attempt"), default=1)
    response_status = models.PositiveSmallIntegerField(_("response status"), null=True, blank=True)
    #: A list of [name, value] pairs, so that a repeated header keeps its place.
    response_headers = models.JSONField(_("response headers"), null=True, blank=True)
    response_body = JSONTextField(_("response body"), null=True, blank=True)
    response_reference = UnicodeTextField(_("response reference"), null=True, blank=True)
    #: Why the latest failed attempt failed. It may be of an earlier attempt than the one that completed the record.
    error = UnicodeTextField(_("last error"), null=True, blank=True)
    lease_expires_at = models.DateTimeField(_("lease ends at"), null=True, blank=True)
    expires_at = models.DateTimeField(_("retention ends at"), db_index=True)
    created_at = models.DateTimeField(_("created at"), db_default=Now())
    completed_at = models.DateTimeField(_("completed at"), null=True, blank=True)
    #: When a purge may delete the response and keep the rest. None: it is kept as long as the record, or it is deleted.
    body_expires_at = models.DateTimeField(_("body is kept until"), null=True, blank=True)

    objects: ClassVar[models.Manager[IdempotencyRecord]] = RecordQuerySet.as_manager()

    class Meta:
        db_table = "idempotency_record"
        verbose_name = _("idempotency record")
        verbose_name_plural = _("idempotency records")
        constraints: ClassVar = [
            # account_id comes first, because it selects the records of one caller, and a partitioned table is
            # distributed by it.
            models.UniqueConstraint(
                fields=["account_id", "operation", "idempotency_key"], name="idempotency_record_scope"
            ),
        ]
        indexes: ClassVar = [
            # Recovery, the statistics and the admin look for a handful of rows among millions of completed ones. With
            # any B-tree that finds them, the completing update can't be heap-only. With a BRIN index it can, but once
            # purged pages are used again the BRIN index matches every page; docs/explanation/benchmarks.md has the
            # figures. The condition is an OR of equalities and not an IN, so that SQLite recognises each of the three
            # states. Only a claim in progress has a lease.
            PartialIndex(
                fields=["status", "lease_expires_at"],
                otherwise=["lease_expires_at"],
                condition=models.Q(status=Status.IN_PROGRESS.value)
                | models.Q(status=Status.RECOVERABLE.value)
                | models.Q(status=Status.PARKED.value),
                name="idempotency_record_unfinished",
            ),
            # Finds the responses that a purge deletes. A record without a time for that is not in it. On a database
            # without partial indexes it is, and no statement of a request searches the index.
            PartialIndex(
                fields=["body_expires_at"],
                otherwise=["body_expires_at"],
                condition=models.Q(body_expires_at__isnull=False),
                name="idempotency_record_body",
            ),
        ]
        permissions: ClassVar = [
            ("view_response_body", "Can view recorded response bodies"),
            ("resolve_idempotencyrecord", "Can say how a parked operation ended"),
            ("release_idempotencyrecord", "Can release a claim so that a retry runs"),
        ]

    def __repr__(self) -> str:
        # The account is left out, because crash reports show the repr of local variables.
        return f"<{type(self).__name__} {self.pk} of operation {self.operation!r}: {self.status}>"

    def __str__(self) -> str:
        return f"{self.operation} of account {self.account_id}, attempt {self.attempt}: {self.status}"

    @property
    def scope(self) -> Scope:
        return Scope(self.account_id, self.operation, self.idempotency_key)

    def derive_key(self, name: str) -> UUID:
        """The key that the operation's attempts derive for the call ``name``. A reconciler asks a provider for it.

        :raises ValueError: the name is empty.
        """
        return self.scope.derive_key(name)

    def derive_text(self, name: str, length: int = 32) -> str:
        """The derived key as ``length`` hexadecimal digits.

        :raises ValueError: the name is empty, or the length is not between 16 and 64.
        """
        return self.scope.derive_text(name, length)


class IdempotencyStep(models.Model):
    """The stored result of one finished step of an operation. It is purged with its record."""

    id = models.BigAutoField(primary_key=True)
    account_id = BytewiseCharField(_("account"), max_length=255)
    #: This is not a foreign key, because its check would cost a look-up at every deletion, and a distributed table
    #: can't enforce it.
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
    """The state of a message of the outbox. The values are stored in the database."""

    PENDING = "pending", _("pending")  # will be sent once it is due, or is being sent while a relay's lease runs
    SENT = "sent", _("sent")  # the broker has confirmed it
    DEAD = "dead", _("dead")  # was tried too often, and waits for somebody to requeue it


class OutboxMessage(models.Model):
    """A message that is published if the transaction that wrote it committed. See ``outbox/``."""

    id = models.BigAutoField(primary_key=True)
    #: The message's identity at the broker. It is the same in every attempt of the operation that publishes it.
    message_id = models.UUIDField(_("message id"), unique=True)
    #: The account of the operation that published it; empty if it was published outside of a claim.
    account_id = BytewiseCharField(_("account"), max_length=255, blank=True, default="")
    #: The key under which a consumer claims it.
    idempotency_key = BytewiseCharField(_("key"), max_length=255)
    topic = BytewiseCharField(_("topic"), max_length=255)
    #: The dotted path of the callable that hands it to a broker.
    sender = BytewiseCharField(_("sender"), max_length=255)
    payload = JSONTextField(_("payload"))
    headers = models.JSONField(_("headers"), default=dict, blank=True)
    #: Messages with one ordering key are sent in the order in which they were written. Empty means no order.
    ordering_key = BytewiseCharField(_("ordering key"), max_length=255, blank=True, default="")
    status = models.CharField(_("status"), max_length=8, choices=MessageStatus.choices, default=MessageStatus.PENDING)
    #: How often a relay has tried to send it. Counted before the attempt, because the relay may die during it. An
    #: attempt that did not take place is subtracted again, and a requeued message starts at 0.
    attempts = models.PositiveIntegerField(_("attempts"), default=0)
    next_try_at = models.DateTimeField(_("next try at"), db_default=Now())
    #: The time until which the relay that is sending it is presumed alive.
    lease_expires_at = models.DateTimeField(_("lease ends at"), null=True, blank=True)
    error = UnicodeTextField(_("last error"), blank=True, default="")
    created_at = models.DateTimeField(_("created at"), db_default=Now())
    sent_at = models.DateTimeField(_("sent at"), null=True, blank=True)

    objects: ClassVar[models.Manager[OutboxMessage]] = models.Manager()

    class Meta:
        db_table = "idempotency_outbox"
        verbose_name = _("outbox message")
        verbose_name_plural = _("outbox messages")
        indexes: ClassVar = [
            # Finds what a relay, the backlog and the admin look for, among many messages that are sent and not purged
            # yet. The order is the due time and not the id, because a lower id may commit after a higher one was sent.
            models.Index(
                fields=["status", "next_try_at"],
                condition=models.Q(status=MessageStatus.PENDING.value) | models.Q(status=MessageStatus.DEAD.value),
                name="idempotency_outbox_unsent",
            ),
            # Finds the unsent messages that come before a message in its order.
            models.Index(
                fields=["ordering_key", "id"],
                condition=~models.Q(ordering_key="") & ~models.Q(status=MessageStatus.SENT.value),
                name="idempotency_outbox_order",
            ),
            # Finds the messages that a purge deletes.
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
    """How often an event happened to an operation's records, in all processes. See ``upkeep/counters.py``."""

    id = models.BigAutoField(primary_key=True)
    #: The hour in which it happened, in hours since 1970 in UTC. 0 means ever since the table was created.
    hour = models.IntegerField(_("hour"), default=0)
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
            # The hour comes first, so that the sums and the last hours are each found without the rest.
            models.UniqueConstraint(fields=["hour", "operation", "event"], name="idempotency_counter_event"),
        ]

    def __str__(self) -> str:
        return f"{self.operation} {self.event}: {self.total}"
