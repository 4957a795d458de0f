"""Whether two requests under one key are taken for one."""

from __future__ import annotations

from typing import Any

from idempotency.models import IdempotencyRecord
from testproject.models import Transfer
from tests.http.callers import Caller, effects, problem_code


class Same:
    """Asserts what is one request and what is another one, by effects and by answers."""

    def __init__(self, caller: Caller) -> None:
        self.caller = caller

    def __call__(self, first: dict[str, Any], second: dict[str, Any]) -> bool:
        Transfer.objects.all().delete()
        IdempotencyRecord.objects.all().delete()
        answers = [self.caller.request(**{"method": "POST", **arguments}, key="k") for arguments in (first, second)]
        assert answers[0].status_code == 201, answers[0].content
        assert effects() == 1
        if answers[1].status_code == 201:
            assert answers[1].content == answers[0].content
            assert answers[1]["Idempotency-Replayed"] == "true"
            return True
        assert problem_code(answers[1]) == "idempotency_key_reused"
        return False
