"""What a storm sends: charges or orders, and the trouble that each meets. Both endpoints get the same."""

import json
from dataclasses import dataclass
from enum import StrEnum

from testproject.management.commands.create_demo_users import DEMO_USERS


class Trouble(StrEnum):
    """What happens to the first request of a charge. The client then retries until it knows the outcome."""

    CALM = "calm"  # the answer arrives
    CUT = "cut"  # the client stops waiting and closes the connection while the server still works
    BURST = "burst"  # several requests at the same instant, some of them cut
    KILL_AT_WORK = "kill_at_work"  # the worker is killed after it wrote the charge, before it answered
    KILL_AT_REPLY = "kill_at_reply"  # the worker is killed when everything is committed but the answer is not sent


#: What happens to one charge after the other. Killings are few because each takes a worker's other requests with it.
TROUBLES = (
    *(Trouble.KILL_AT_WORK, Trouble.KILL_AT_REPLY),
    *(Trouble.CALM, Trouble.CUT, Trouble.CALM, Trouble.BURST) * 8,
)
#: The fewest charges, and orders, among which each kind of trouble comes up.
FEWEST = 20


@dataclass(frozen=True)
class Charge:
    """One logical charge or order, to be sent once, however many requests that takes."""

    number: int
    label: str  # its key, and its name where its effects are counted; no endpoint looks at it
    is_order: bool = False

    @property
    def account(self) -> str:
        return DEMO_USERS[self.number % len(DEMO_USERS)]

    @property
    def trouble(self) -> Trouble:
        return TROUBLES[self.number % len(TROUBLES)]

    @property
    def is_sent_late(self) -> bool:
        """Whether it is sent once more when the outcome is known."""
        return self.number % 3 == 0

    @property
    def is_sent_changed(self) -> bool:
        """Whether its key is then used with another amount, which the control of orders would rightly accept."""
        return self.number % 5 == 0 and not self.is_order

    @property
    def declined(self) -> bool:
        """Whether it must be refused, after its message was published, and leave nothing behind."""
        return self.is_order and self.number % 6 == 5

    def payload(self, *, changed: bool = False) -> bytes:
        source = "declined" if self.declined else "card"
        body = {"amount": 1000 + self.number + changed, "label": self.label, "source": source}
        return json.dumps(body if self.is_order else {**body, "currency": "usd"}).encode()
