"""The charge as its clients see it."""

from __future__ import annotations

from typing import Any, ClassVar

from rest_framework import serializers

from .models import MAX_AMOUNT, BaseCharge, Charge, UnprotectedCharge

#: The means of payment. "declined" never works, so that it shows a recorded failure.
SOURCES = ("card", "declined")


class BaseChargeSerializer(serializers.ModelSerializer[Any]):
    amount = serializers.IntegerField(min_value=1, max_value=MAX_AMOUNT)
    currency = serializers.RegexField(r"\A[a-z]{3}\Z")
    source = serializers.ChoiceField(choices=SOURCES, default="card", write_only=True)  # type: ignore[assignment]

    class Meta:
        model: type[BaseCharge]
        fields: ClassVar = ["id", "amount", "currency", "reference", "label", "source", "created_at"]


class ChargeSerializer(BaseChargeSerializer):
    class Meta(BaseChargeSerializer.Meta):
        model = Charge


class UnprotectedChargeSerializer(BaseChargeSerializer):
    class Meta(BaseChargeSerializer.Meta):
        model = UnprotectedCharge
