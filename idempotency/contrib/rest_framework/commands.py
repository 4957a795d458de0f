"""The command that a serializer makes of a payload, for the fingerprint."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rest_framework import serializers
from rest_framework.exceptions import ValidationError
from rest_framework.fields import Field, SkipField, empty
from rest_framework.relations import ManyRelatedField, RelatedField


def declared_fields(serializer: Any, data: Any) -> object:
    """The part of a payload that a serializer declares, each field in its own type.

    Only ``to_internal_value`` of fields that don't query: validators and relations look at state that the first
    execution changes, and a retry must have the same fingerprint. What a field can't read stays as it was sent.
    """
    if isinstance(serializer, serializers.ListSerializer):
        if not isinstance(data, list):
            return data
        return [declared_fields(serializer.child, item) for item in data]
    if not isinstance(serializer, serializers.Serializer) or not isinstance(data, Mapping):
        return data
    return {
        name: _read(field, value)
        for name, field in serializer.fields.items()
        if not field.read_only and (value := field.get_value(data)) is not empty
    }


def _read(field: Field[Any, Any, Any, Any], value: Any) -> object:
    if isinstance(field, serializers.BaseSerializer):
        return declared_fields(field, value)
    if value is None or isinstance(field, (RelatedField, ManyRelatedField)):
        return value
    convert: Callable[[Any], object] = field.to_internal_value
    try:
        return convert(value)
    except (ValidationError, SkipField):
        return value
