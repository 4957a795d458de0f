"""The tables: records and steps. The statements that decide who owns a record are in ``store/``."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, ClassVar, Final
from uuid import UUID

from django.conf import settings
from django.db import models
from django.db.models import Q, functions
from django.db.models.expressions import Combinable
from django.utils.timezone import get_default_timezone, is_aware, make_aware, make_naive
from django.utils.translation import gettext_lazy as _

from .conf import require_app
from .identity.scope import Scope
from .lifecycle import Status

__all__ = [
    "IdempotencyRecord",
    "RecordQuerySet",
]

require_app("idempotency")


if TYPE_CHECKING:  # Django's fields take no type arguments when the code runs
    _CharField = models.CharField[str, str]
    _TextField = models.TextField[Any, Any]
    _DateTimeField = models.DateTimeField[datetime | Combinable | None, Any]
else:
    _CharField = models.CharField
    _TextField = models.TextField
    _DateTimeField = models.DateTimeField


class BytewiseCharField(_CharField):
    """Text that is compared byte by byte.

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


class UnicodeTextField(_TextField):
    """Text with any characters. A database's character set on MySQL or MariaDB may not have all of them."""

    def db_parameters(self, connection: Any) -> Any:
        parameters = super().db_parameters(connection)
        if connection.vendor == "mysql":
            parameters["collation"] = "utf8mb4_bin"
        return parameters


class JSONTextField(UnicodeTextField):
    """JSON that is stored and read as its exact text.

    On PostgreSQL its type is ``json``, which keeps the text and checks its syntax. ``jsonb`` would lose the order of
    names, white space and the spelling of numbers. On other databases it is a text column.
    """

    def db_type(self, connection: Any) -> str | None:
        return "json" if connection.vendor == "postgresql" else super().db_type(connection)

    def select_format(self, compiler: Any, sql: str, params: Any) -> tuple[str, Any]:
        # Without the cast, the driver parses the column into Python objects and the exact text is lost.
        return (f"{sql}::text" if compiler.connection.vendor == "postgresql" else sql), params


class UTCDateTimeField(_DateTimeField):
    """A time that the database stores in UTC, regardless of ``USE_TZ`` and ``TIME_ZONE``.

    PostgreSQL stores instants. Other databases store wall clocks, and by a local one a lease would end an hour early or
    late in two nights a year. In Python it is as in any ``DateTimeField``: aware, or without ``USE_TZ`` naive in the
    project's zone. For an hour a year naive times are ambiguous, so the database compares what decides. None is sent to
    the database, because a worker of Citus would read it in the zone of its session, not the coordinator's.
    """

    def from_db_value(self, value: datetime | None, expression: object, connection: Any) -> datetime | None:
        if value is None or connection.features.supports_timezones:
            return value
        moment = value.replace(tzinfo=UTC)  # Django has assumed the connection's time zone, or none
        return moment if settings.USE_TZ else make_naive(moment, get_default_timezone())

    def get_db_prep_value(self, value: Any, connection: Any, prepared: bool = False) -> Any:
        moment = value if prepared else self.get_prep_value(value)
        if isinstance(moment, datetime):
            moment = moment if is_aware(moment) else make_aware(moment, get_default_timezone())
            if not connection.features.supports_timezones:
                moment = make_naive(moment, UTC)  # the backend leaves it as it is
        return super().get_db_prep_value(moment, connection, prepared=True)


class Now(functions.Now):  # noqa: TID251
    """The time of the database's clock, in UTC. Django's ``Now`` is the session's wall clock on MySQL and MariaDB."""

    output_field = UTCDateTimeField()

    def as_mysql(self, compiler: Any, connection: Any, **context: Any) -> Any:
        return self.as_sql(compiler, connection, template="UTC_TIMESTAMP(6)", **context)


class PartialIndex(models.Index):
    """A partial index. Databases without partial indexes get a plain index on ``otherwise`` instead.

    MySQL and MariaDB ignore the condition. The index would then contain every record, and an update of one record would
    lock others in it.

    :param otherwise: the columns of the plain index.
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


#: Claims whose lease is over.
ABANDONED: Final = Q(status=Status.IN_PROGRESS, lease_expires_at__lte=Now())
#: Completed records that are kept longer than their response, which is due for a purge.
BODY_DUE: Final = Q(status=Status.COMPLETED, body_expires_at__lte=Now(), expires_at__gt=Now())

_STATUSES = [
    (Status.IN_PROGRESS.value, _("in progress")),
    (Status.COMPLETED.value, _("completed")),
    (Status.RECOVERABLE.value, _("recoverable")),
    (Status.PARKED.value, _("parked")),
]


class RecordQuerySet(models.QuerySet["IdempotencyRecord"]):
    """Queries for records by scope and state. Times are compared by the database's clock."""

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
        """Claims whose lease is over: the process is gone, or takes longer than its lease."""
        return self.filter(ABANDONED)

    def past_retention(self) -> RecordQuerySet:
        """Records past their retention that are not in progress."""
        return self.exclude(status=Status.IN_PROGRESS).filter(expires_at__lte=Now())


class IdempotencyRecord(models.Model):
    """One logical operation: its account, operation and key, its current attempt, and its outcome."""

    id: models.BigAutoField[int, int] = models.BigAutoField(primary_key=True)
    account_id: BytewiseCharField = BytewiseCharField(_("account"), max_length=255)
    operation: BytewiseCharField = BytewiseCharField(_("operation"), max_length=255)
    idempotency_key: BytewiseCharField = BytewiseCharField(_("key"), max_length=255)
    request_hash: models.CharField[str, str] = models.CharField(_("payload's fingerprint"), max_length=128)
    status: models.CharField[str, str] = models.CharField(_("status"), max_length=16, choices=_STATUSES)
    #: The fencing number: 1 for the first claim, plus 1 for every later claim, never reset.
    attempt: models.PositiveIntegerField[int, int] = models.PositiveIntegerField(_("attempt"), default=1)
    response_status: models.PositiveSmallIntegerField[int | None, int | None] = models.PositiveSmallIntegerField(
        _("response status"), null=True, blank=True
    )
    #: A list of [name, value] pairs, so that a repeated header keeps its place.
    response_headers: models.JSONField[Any, Any] = models.JSONField(_("response headers"), null=True, blank=True)
    response_body: JSONTextField = JSONTextField(_("response body"), null=True, blank=True)
    response_reference: UnicodeTextField = UnicodeTextField(_("response reference"), null=True, blank=True)
    #: Why the latest failed attempt failed. The attempt that completed the record may be a later one.
    error: UnicodeTextField = UnicodeTextField(_("last error"), null=True, blank=True)
    #: How attempts began and ended, unless the first one completed. See ``store/history.py``.
    history: models.JSONField[Any, Any] = models.JSONField(_("history"), null=True, blank=True)
    lease_expires_at: UTCDateTimeField = UTCDateTimeField(_("lease ends at"), null=True, blank=True)
    expires_at: UTCDateTimeField = UTCDateTimeField(_("retention ends at"))
    created_at: UTCDateTimeField = UTCDateTimeField(_("created at"), db_default=Now())
    completed_at: UTCDateTimeField = UTCDateTimeField(_("completed at"), null=True, blank=True)
    #: When a purge may delete the response and keep the rest. None if it is kept as long as the record, or deleted.
    body_expires_at: UTCDateTimeField = UTCDateTimeField(_("body is kept until"), null=True, blank=True)
    #: The database session of the claim's handler, if its end may end the lease. PostgreSQL's process id.
    session: models.IntegerField[int | None, int | None] = models.IntegerField(_("session"), null=True, blank=True)

    objects: ClassVar[models.Manager[IdempotencyRecord]] = RecordQuerySet.as_manager()

    class Meta:
        db_table = "idempotency_record"
        verbose_name: ClassVar[Any] = _("idempotency record")
        verbose_name_plural: ClassVar[Any] = _("idempotency records")
        constraints: ClassVar[list[models.BaseConstraint]] = [
            # account_id comes first, because it selects the records of one caller, and a partitioned table is
            # partitioned by it.
            models.UniqueConstraint(
                fields=["account_id", "operation", "idempotency_key"], name="idempotency_record_scope"
            ),
        ]
        indexes: ClassVar[list[models.Index]] = [
            # Recovery, the statistics and the admin search for a handful of rows among millions of completed ones. With
            # any B-tree that finds them, the completing update can't be heap-only. With a BRIN index it can, but once
            # purged pages are reused the BRIN index matches every page; CONTRIBUTING.md has the figures. The condition
            # is an OR of equalities and not an IN, so that SQLite recognises each of the three states. Only a claim in
            # progress has a lease.
            PartialIndex(
                fields=["status", "lease_expires_at"],
                otherwise=["lease_expires_at"],
                condition=Q(status=Status.IN_PROGRESS.value)
                | Q(status=Status.RECOVERABLE.value)
                | Q(status=Status.PARKED.value),
                name="idempotency_record_unfinished",
            ),
            # Finds the records that a purge deletes. It omits claims in progress, so that a claim adds no entry.
            PartialIndex(
                fields=["expires_at"],
                otherwise=["expires_at"],
                condition=~Q(status=Status.IN_PROGRESS.value),
                name="idempotency_record_due",
            ),
            # Finds the responses that a purge deletes. Records without body retention are not in it. Without partial
            # indexes they are, but no statement of a request searches this index.
            PartialIndex(
                fields=["body_expires_at"],
                otherwise=["body_expires_at"],
                condition=Q(body_expires_at__isnull=False),
                name="idempotency_record_body",
            ),
        ]
        permissions: ClassVar[list[tuple[str, Any]]] = [
            ("view_response_body", "Can view recorded response bodies"),
            ("resolve_idempotencyrecord", "Can resolve a parked operation"),
            ("release_idempotencyrecord", "Can release a claim so that a retry runs"),
            ("forget_idempotencyrecord", "Can forget an outcome so that a retry runs again"),
        ]

    def __repr__(self) -> str:
        # Without the account, because crash reports show the repr of local variables.
        return f"<{type(self).__name__} {self.pk} of operation {self.operation!r}: {self.status}>"

    def __str__(self) -> str:
        return f"{self.operation} of account {self.account_id}, attempt {self.attempt}: {self.status}"

    @property
    def scope(self) -> Scope:
        return Scope(self.account_id, self.operation, self.idempotency_key)

    def derive_key(self, name: str) -> UUID:
        """The key that the operation's attempts derive for the call ``name``. A reconciler queries a provider by it.

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

    id: models.BigAutoField[int, int] = models.BigAutoField(primary_key=True)
    account_id: BytewiseCharField = BytewiseCharField(_("account"), max_length=255)
    #: Not a foreign key, because its check would cost a look-up for every deletion, and a distributed table can't
    #: enforce it.
    record_id: models.BigIntegerField[int, int] = models.BigIntegerField(_("record"))
    name: BytewiseCharField = BytewiseCharField(_("name"), max_length=255)
    result: JSONTextField = JSONTextField(_("result"))
    created_at: UTCDateTimeField = UTCDateTimeField(_("created at"), db_default=Now())

    objects: ClassVar[models.Manager[IdempotencyStep]] = models.Manager()

    class Meta:
        db_table = "idempotency_step"
        verbose_name: ClassVar[Any] = _("step")
        verbose_name_plural: ClassVar[Any] = _("steps")
        constraints: ClassVar[list[models.BaseConstraint]] = [
            models.UniqueConstraint(fields=["account_id", "record_id", "name"], name="idempotency_step_name"),
        ]

    def __str__(self) -> str:
        return f"{self.name} of record {self.record_id}"
