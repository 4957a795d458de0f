"""A charge, and when making one is held, declined, or breaks down."""

from __future__ import annotations

import socket
from typing import Any

from django.conf import settings
from django.db import models
from rest_framework.exceptions import APIException

DECLINED, BREAKS_DOWN = 402, 500


class DeclinedError(APIException):
    status_code = DECLINED


class Charge(models.Model):
    account = models.ForeignKey("auth.User", models.CASCADE)
    amount = models.IntegerField()

    def __str__(self) -> str:
        return f"{self.account}: {self.amount}"

    def save(self, *args: Any, **kwargs: Any) -> None:
        """Count the run where no rollback can undo it, and wait while there is a gate."""
        with (settings.SHARED / "runs").open("a") as runs:
            runs.write("run\n")
        if (gate := settings.SHARED / "gate").exists():
            with socket.socket(socket.AF_UNIX) as waiting:
                waiting.connect(str(gate))
                waiting.recv(1)
        if self.amount == DECLINED:
            raise DeclinedError
        if self.amount == BREAKS_DOWN:
            raise RuntimeError("broken down")
        super().save(*args, **kwargs)
