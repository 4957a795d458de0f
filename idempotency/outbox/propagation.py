"""Where an integration carries context from the code that publishes a message to the code that sends it.

Both lists are empty unless an integration is switched on. What it adds must not raise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Final

from ..models import OutboxMessage

#: Called when a message is published. Each returns headers for it; headers of the caller win over them.
header_sources: Final[list[Callable[[], Mapping[str, str]]]] = []

#: Called when a relay hands a message to its sender. Each returns the context in which the sender runs.
sending_contexts: Final[list[Callable[[OutboxMessage], AbstractContextManager[object]]]] = []
