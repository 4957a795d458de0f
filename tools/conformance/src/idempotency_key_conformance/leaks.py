"""Detects that an answer discloses part of another request's result."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from typing import Any

from .wire import Answer, Request

#: A shorter text may appear anywhere by chance.
TELLING = 8
#: A number this close to the current Unix time, in seconds, is taken for a time.
DAY = 86400.0
_TIME = re.compile(r"\d{4}-\d\d-\d\d|\d\d:\d\d")


def _pairs(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield each member with a scalar value, at any depth, including JSON inside strings."""
    if isinstance(value, list):
        for item in value:
            yield from _pairs(item)
    elif isinstance(value, dict):
        for name, item in value.items():
            inner = _parsed(item) if isinstance(item, str) else item
            if isinstance(inner, list | dict):
                yield from _pairs(inner)
            else:
                yield name, item


def _parsed(text: str | bytes) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


def _is_telling(value: Any) -> bool:
    """Whether a value may identify a result. Times, booleans and null don't: unrelated results may share them."""
    if isinstance(value, str):
        return not _TIME.search(value)
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value - time.time()) > DAY


def _members(body: bytes) -> set[tuple[str, str]]:
    return {(name, str(value)) for name, value in _pairs(_parsed(body)) if _is_telling(value)}


def _traces(answer: Answer) -> set[tuple[str, str]]:
    """The (name, value) pairs by which a result could be recognised."""
    found = {("Location", answer.field("Location") or "")}
    if isinstance(_parsed(answer.body), list | dict):
        return found | _members(answer.body)
    return found | {("the body", answer.body.decode(errors="replace").strip())}


class Leaks:
    """Compares answers with results. Learns which values several results share, because these identify none."""

    def __init__(self) -> None:
        self._seen: set[tuple[str, str]] = set()
        self._common: set[tuple[str, str]] = set()

    def learn(self, result: Answer) -> None:
        traces = _traces(result)
        self._common |= self._seen & traces
        self._seen |= traces

    def shown(self, result: Answer, answer: Answer, request: Request) -> str | None:
        """The part of the result that the answer to another ``request`` discloses, or None.

        Values that ``request`` itself contains don't count, because its sender knows them.
        """
        members = _members(answer.body)
        # Parsed values too, because a body may hold JSON in JSON, where values are escaped.
        texts = [value for _, value in (*answer.fields, *members)]
        text = "\n".join([answer.body.decode(errors="replace"), *texts])
        sent = (request.head + request.body).decode(errors="replace")
        for name, value in sorted(_traces(result) - self._common - _members(request.body)):
            is_in_text = len(value) >= TELLING and value in text and value not in sent
            if is_in_text or (name, value) in members:
                return f"{name} ({value[:60]})"
        return None

    def is_same_place(self, result: Answer, other: Answer) -> bool:
        place = result.field("Location")
        return place is not None and place == other.field("Location") and ("Location", place) not in self._common
