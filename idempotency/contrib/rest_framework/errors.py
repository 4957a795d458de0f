"""The package's errors as exceptions that DRF's exception handlers understand."""

from __future__ import annotations

from rest_framework.exceptions import APIException

from ...exceptions import IdempotencyError
from ...http.problems import problem


class IdempotencyAPIException(APIException):
    """An ``IdempotencyError`` as an ``APIException``. ``__cause__`` is the original error.

    ``detail`` is an ``ErrorDetail``, as in DRF's own errors, because exception handlers, loggers and packages that
    standardize errors expect that type.
    """

    def __init__(self, error: IdempotencyError) -> None:
        self.status_code = error.status_code
        self.default_code = error.code
        super().__init__(detail=problem(error)["detail"], code=error.code)
        self.wait = error.retry_after  # DRF's handler turns it into Retry-After
        self.auth_header: str | None = None
        self.__cause__ = error
