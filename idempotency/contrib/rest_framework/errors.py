"""Our errors as DRF's exception handlers know errors."""

from __future__ import annotations

from rest_framework.exceptions import APIException

from ...exceptions import IdempotencyError
from ...http.problems import problem


class IdempotencyAPIException(APIException):
    """An ``IdempotencyError`` as DRF's exception handlers know errors; the original is ``__cause__``.

    ``detail`` is DRF's own ``ErrorDetail``, as it is of DRF's own errors, for whatever reads exceptions: other
    handlers, packages that standardize errors, loggers.
    """

    def __init__(self, error: IdempotencyError) -> None:
        self.status_code = error.status_code
        self.default_code = error.code
        super().__init__(detail=problem(error)["detail"], code=error.code)
        self.wait = error.retry_after  # DRF's handler makes Retry-After of it
        self.auth_header: str | None = None
        self.__cause__ = error
