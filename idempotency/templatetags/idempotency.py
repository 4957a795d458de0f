"""``{% idempotency_key %}``: a hidden field with a new key, for a form that is written in a template."""

from __future__ import annotations

from typing import Final

from django import template
from django.utils.html import format_html
from django.utils.safestring import SafeString

from ..http.key_sources import FORM_FIELD
from ..identity.keys import new_key

register: Final = template.Library()


@register.simple_tag
def idempotency_key(field: str = FORM_FIELD) -> SafeString:
    """A hidden field with a new key. The form's view has ``key=FromForm()``.

    :param field: the field's name.
    """
    return format_html('<input type="hidden" name="{}" value="{}" autocomplete="off">', field, new_key())
