from typing import ClassVar

from django.db import migrations, models

import idempotency.models


class Migration(migrations.Migration):
    initial: ClassVar[bool] = True

    dependencies: ClassVar[list[tuple[str, str]]] = []

    operations: ClassVar[list[migrations.operations.base.Operation]] = [
        migrations.CreateModel(
            name="IdempotencyCounter",
            fields=[
                ("id", models.BigAutoField(primary_key=True, serialize=False)),
                ("hour", models.IntegerField(default=0, verbose_name="hour")),
                ("operation", idempotency.models.BytewiseCharField(max_length=255, verbose_name="operation")),
                ("event", idempotency.models.BytewiseCharField(max_length=32, verbose_name="event")),
                ("total", models.BigIntegerField(default=0, verbose_name="total")),
            ],
            options={
                "verbose_name": "counter",
                "verbose_name_plural": "dashboard",
                "db_table": "idempotency_dashboard_counter",
                "constraints": [
                    models.UniqueConstraint(fields=("hour", "operation", "event"), name="idempotency_dashboard_event")
                ],
            },
        ),
    ]
