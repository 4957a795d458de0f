from typing import Any

import django.db.models.deletion
from django.conf import settings
from django.core.validators import MaxValueValidator, MinValueValidator, RegexValidator
from django.db import migrations, models

Field = tuple[str, Any]


def key() -> Field:
    return "id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")


def amount() -> Field:
    return "amount", models.BigIntegerField(validators=[MinValueValidator(1), MaxValueValidator(10**12)])


def effect(name: str, *fields: Field) -> migrations.CreateModel:
    account = models.ForeignKey(
        on_delete=django.db.models.deletion.CASCADE, related_name="+", to=settings.AUTH_USER_MODEL
    )
    return migrations.CreateModel(
        name,
        [
            *(() if name == "Export" else (key(),)),
            ("label", models.CharField(blank=True, db_index=True, default="", max_length=128)),
            ("created_at", models.DateTimeField(auto_now_add=True)),
            *fields,
            ("account", account),
        ],
    )


def charge(name: str) -> migrations.CreateModel:
    return effect(
        name,
        amount(),
        ("currency", models.CharField(max_length=3, validators=[RegexValidator("\\A[a-z]{3}\\Z")])),
        ("reference", models.CharField(max_length=64, null=True, unique=True)),
    )


def receipt(name: str) -> migrations.CreateModel:
    return migrations.CreateModel(
        name,
        [
            key(),
            ("label", models.CharField(db_index=True, max_length=128)),
            ("amount", models.BigIntegerField()),
            ("created_at", models.DateTimeField(auto_now_add=True)),
        ],
    )


class Migration(migrations.Migration):
    initial = True
    dependencies = [migrations.swappable_dependency(settings.AUTH_USER_MODEL)]
    operations = [
        receipt("Receipt"),
        receipt("UnprotectedReceipt"),
        charge("Charge"),
        charge("UnprotectedCharge"),
        effect("Transfer", ("recipient", models.CharField(max_length=64)), amount()),
        effect("Notification", ("recipient", models.CharField(max_length=64)), ("message", models.TextField())),
        effect(
            "Payout",
            ("key", models.UUIDField(unique=True)),
            ("provider_id", models.BigIntegerField()),
            ("amount", models.BigIntegerField()),
        ),
        effect(
            "Export",
            ("id", models.UUIDField(primary_key=True, serialize=False)),
            ("charges", models.BigIntegerField(null=True)),
            ("total", models.BigIntegerField(null=True)),
            ("runs", models.PositiveIntegerField(default=0)),
            ("finished_at", models.DateTimeField(null=True)),
        ),
    ]
