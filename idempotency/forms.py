"""Forms with a key generated when the form is shown, so that a double click or the back button sends the same key."""

from __future__ import annotations

from typing import Any

from django import forms
from django.utils.functional import cached_property

from .http.key_sources import FORM_FIELD
from .identity.keys import new_key

__all__ = ["IdempotencyKeyMixin"]


class KeyField(forms.CharField):
    """A hidden field with a new key each time a form is shown.

    It never shows submitted data, because a form shown with errors is corrected, which changes its payload. It never
    shows initial values, because they may come from a link's query: all forms shown by the link would share one key.
    """

    # Otherwise Firefox restores hidden fields when a page is reloaded.
    widget: forms.Widget = forms.HiddenInput(attrs={"autocomplete": "off"})

    @cached_property
    def _key(self) -> str:  # each form has a copy of its fields
        return new_key()

    def prepare_value(self, value: object) -> str:
        return self._key

    def has_changed(self, initial: object, data: object) -> bool:
        return False  # an empty form of a formset stays empty


class IdempotencyKeyMixin:
    """Adds the hidden field ``idempotency_key``, which is not part of ``cleaned_data``.

    Put it before ``Form`` or ``ModelForm`` among the bases. The form's view needs ``key=FromForm()``.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.fields[FORM_FIELD] = KeyField(required=False)  # type: ignore[attr-defined]

    def full_clean(self) -> None:
        super().full_clean()  # type: ignore[misc]
        getattr(self, "cleaned_data", {}).pop(FORM_FIELD, None)
