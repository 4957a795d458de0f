"""A handler's failure, and how an answer names what went wrong."""

from __future__ import annotations

from typing import Any


def fail(request: Any = None) -> None:
    raise RuntimeError("on purpose")


def code_of(answer: Any) -> str:
    assert answer["Content-Type"] == "application/problem+json"
    return str(answer.json()["code"])
