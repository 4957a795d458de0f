"""Forms with a key: it is made when the form is shown, so a double click and the back button send it again."""

from __future__ import annotations

from typing import Any

from django import forms

from ..identity.timed import new_key
from .key_sources import FORM_FIELD


class KeyField(forms.CharField):
    """A hidden field with a new key each time the form is shown."""

    widget = forms.HiddenInput

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"required": False, "initial": new_key, **options})

    def bound_data(self, data: Any, initial: Any) -> Any:
        """A form that is shown again with its errors has a new key, because its corrected payload is another one."""
        return new_key()

    def has_changed(self, initial: Any, data: Any) -> bool:
        return False  # an empty form of a formset stays empty


class IdempotencyKeyMixin:
    """A mixin for a ``Form`` or ``ModelForm``, before it among the bases. Its view has ``key=FromForm()``.

    It adds the hidden field ``idempotency_key``, which is not part of ``cleaned_data``.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.fields[FORM_FIELD] = KeyField()  # type: ignore[attr-defined]

    def full_clean(self) -> None:
        super().full_clean()  # type: ignore[misc]
        getattr(self, "cleaned_data", {}).pop(FORM_FIELD, None)
