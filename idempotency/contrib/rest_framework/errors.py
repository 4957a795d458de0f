"""Our errors as DRF's exception handlers know errors."""

from __future__ import annotations

from typing import Any

from rest_framework.exceptions import APIException

from ...exceptions import IdempotencyError
from ...http.problems import problem


class IdempotencyAPIException(APIException):
    """An ``IdempotencyError`` as DRF's exception handlers know errors; the original is ``__cause__``."""

    def __init__(self, error: IdempotencyError) -> None:
        self.status_code = error.status_code
        self.default_code = error.code
        # Not through APIException.__init__, which would turn the status member into text.
        self.detail = problem(error)
        self.wait = error.retry_after  # DRF's handler makes Retry-After of it
        self.auth_header: str | None = None
        self.__cause__ = error

    def __str__(self) -> str:
        return str(self.__cause__)

    def get_codes(self) -> str:
        return self.default_code

    def get_full_details(self) -> Any:
        return self.detail
