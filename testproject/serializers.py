"""The API's representation of charges."""

from typing import Any, ClassVar

from rest_framework import serializers

from .models import BaseCharge, Charge, UnprotectedCharge

#: Payment methods. "declined" always fails, to demonstrate a recorded failure.
SOURCES = ("card", "declined")


class ChargeSerializer(serializers.ModelSerializer[Any]):
    source: Any = serializers.ChoiceField(choices=SOURCES, default="card", write_only=True)

    class Meta:
        model: type[BaseCharge] = Charge
        fields: ClassVar = ["id", "amount", "currency", "reference", "label", "source", "created_at"]


class UnprotectedChargeSerializer(ChargeSerializer):
    class Meta(ChargeSerializer.Meta):
        model = UnprotectedCharge
