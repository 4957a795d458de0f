from typing import ClassVar

from django.db import migrations, models

import idempotency.models


class Migration(migrations.Migration):
    initial: ClassVar[bool] = True

    dependencies: ClassVar[list[tuple[str, str]]] = []

    operations: ClassVar[list[migrations.operations.base.Operation]] = [
        migrations.CreateModel(
            name="OutboxMessage",
            fields=[
                ("id", models.BigAutoField(primary_key=True, serialize=False)),
                ("message_id", models.UUIDField(unique=True, verbose_name="message id")),
                (
                    "account_id",
                    idempotency.models.BytewiseCharField(
                        blank=True, default="", max_length=255, verbose_name="account"
                    ),
                ),
                ("idempotency_key", idempotency.models.BytewiseCharField(max_length=255, verbose_name="key")),
                ("topic", idempotency.models.BytewiseCharField(max_length=255, verbose_name="topic")),
                ("sender", idempotency.models.BytewiseCharField(max_length=255, verbose_name="sender")),
                ("payload", idempotency.models.JSONTextField(verbose_name="payload")),
                ("headers", models.JSONField(blank=True, default=dict, verbose_name="headers")),
                (
                    "status",
                    models.CharField(
                        choices=[("pending", "pending"), ("sent", "sent"), ("dead", "dead")],
                        default="pending",
                        max_length=8,
                        verbose_name="status",
                    ),
                ),
                ("attempts", models.PositiveIntegerField(default=0, verbose_name="attempts")),
                (
                    "next_try_at",
                    idempotency.models.UTCDateTimeField(
                        db_default=idempotency.models.Now(), verbose_name="next try at"
                    ),
                ),
                (
                    "lease_expires_at",
                    idempotency.models.UTCDateTimeField(blank=True, null=True, verbose_name="lease ends at"),
                ),
                ("error", idempotency.models.UnicodeTextField(blank=True, default="", verbose_name="last error")),
                (
                    "created_at",
                    idempotency.models.UTCDateTimeField(db_default=idempotency.models.Now(), verbose_name="created at"),
                ),
                ("sent_at", idempotency.models.UTCDateTimeField(blank=True, null=True, verbose_name="sent at")),
            ],
            options={
                "verbose_name": "outbox message",
                "verbose_name_plural": "outbox messages",
                "db_table": "idempotency_outbox_message",
                "permissions": [
                    ("view_payload", "Can view the payloads of messages"),
                    ("requeue_outboxmessage", "Can requeue a dead message"),
                ],
                "indexes": [
                    models.Index(
                        condition=models.Q(("status", "pending"), ("status", "dead"), _connector="OR"),
                        fields=["status", "next_try_at"],
                        name="idempotency_outbox_unsent",
                    ),
                    models.Index(
                        condition=models.Q(("status", "sent")), fields=["sent_at"], name="idempotency_outbox_sent"
                    ),
                ],
            },
        ),
    ]
