"""The payload of a DRF request for its fingerprint: as sent, or the fields of a serializer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from django.http import HttpRequest
from rest_framework import serializers
from rest_framework.exceptions import ValidationError
from rest_framework.fields import Field, SkipField, empty
from rest_framework.relations import ManyRelatedField, RelatedField

from ...identity.parsing import parse_json
from ...outcome import is_json


def as_sent(data: object, http: HttpRequest) -> object:
    """The canonical text of a JSON body that can still be read; otherwise ``data``, the payload as DRF parsed it.

    DRF's floats can't distinguish 9007199254740992.5 from 9007199254740993.0, and DRF drops one of two equal names. A
    handler that parses the body itself may notice the difference.
    """
    if is_json(http.content_type or "") and hasattr(http, "_body") and not isinstance(data, bytes):
        # An error means that the body is empty or not in UTF-8, although DRF parsed it.
        with suppress(ValueError):
            return parse_json(http.body)
    return data


def declared_fields(serializer: Any, data: Any) -> object:
    """The part of a payload that a serializer declares, with each value converted to its field's type.

    Only ``to_internal_value`` is used, and only for fields that don't query the database, because a retry must have the
    same fingerprint, and validators and relations depend on state that the first execution changes. A value that a
    field can't read is used as sent.
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
