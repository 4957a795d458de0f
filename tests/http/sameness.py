"""Whether two requests under one key are taken for one."""

from __future__ import annotations

from typing import Any

from idempotency.models import IdempotencyRecord
from tests.http.callers import Caller, effects, problem_code, replayed


class Same:
    """Says whether a second request is the first one again, by effects and by answers.

    A request is given as its body (bytes), as its URL, or as the arguments of ``Caller.request``.
    """

    def __init__(self, caller: Caller) -> None:
        self.caller = caller

    def __call__(self, first: Any, second: Any, **of_both: Any) -> bool:
        IdempotencyRecord.objects.all().delete()
        one, other = ({"method": "POST", "key": "k"} | of_both | _arguments(sent) for sent in (first, second))
        answer, _ = replayed(self.caller, **one)
        assert answer.status_code == 201, answer.content
        before = effects()
        again = self.caller.request(**other)
        assert effects() == before
        if again.status_code == 201:
            assert (again.content, again["Idempotency-Replayed"]) == (answer.content, "true")
            return True
        assert problem_code(again) == "idempotency_key_reused"
        return False


def _arguments(sent: Any) -> dict[str, Any]:
    if isinstance(sent, bytes):
        return {"data": sent}
    return {"url": sent} if isinstance(sent, str) else sent
