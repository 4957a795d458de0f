"""The charges and orders of a storm, and the trouble that each runs into. Both endpoints get the same."""

import json
from dataclasses import dataclass
from enum import StrEnum

from testproject.management.commands.create_demo_users import DEMO_USERS


class Trouble(StrEnum):
    """What happens to the first request of a charge. The client then retries until it knows the outcome."""

    CALM = "calm"  # the response arrives
    CUT = "cut"  # the client closes the connection while the server is still working
    BURST = "burst"  # several requests at the same instant, some of which are cut
    KILL_AT_WORK = "kill_at_work"  # the worker is killed right after it wrote the charge
    KILL_AT_REPLY = "kill_at_reply"  # the worker is killed after the commit, before it sends the response


#: The troubles of successive charges. Kills are rare, because each also ends the worker's other requests.
TROUBLES = (
    *(Trouble.KILL_AT_WORK, Trouble.KILL_AT_REPLY),
    *(Trouble.CALM, Trouble.CUT, Trouble.CALM, Trouble.BURST) * 8,
)
#: The minimum number of charges and of orders that covers each kind of trouble.
FEWEST = 20


@dataclass(frozen=True)
class Charge:
    """One logical charge or order, which must take effect once, however many requests are sent."""

    number: int
    label: str  # its key, and its name in the count of effects; endpoints ignore it
    is_order: bool = False

    @property
    def account(self) -> str:
        return DEMO_USERS[self.number % len(DEMO_USERS)]

    @property
    def trouble(self) -> Trouble:
        return TROUBLES[self.number % len(TROUBLES)]

    @property
    def is_sent_late(self) -> bool:
        """Whether it is sent once more after the outcome is known."""
        return self.number % 3 == 0

    @property
    def is_sent_changed(self) -> bool:
        """Whether its key is then reused with another amount, which the unprotected endpoint for orders may accept."""
        return self.number % 5 == 0 and not self.is_order

    @property
    def declined(self) -> bool:
        """Whether it must be refused after its message was published, without leaving an effect."""
        return self.is_order and self.number % 6 == 5

    def payload(self, *, changed: bool = False) -> bytes:
        source = "declined" if self.declined else "card"
        body = {"amount": 1000 + self.number + changed, "label": self.label, "source": source}
        return json.dumps(body if self.is_order else {**body, "currency": "usd"}).encode()
