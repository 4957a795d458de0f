"""Names shared by the harness and its processes. The harness does not load Django."""

#: The tasks: one that is protected, and its control.
KEPT = "delivery.kept"
PLAIN = "delivery.plain"

#: The queue for dead-lettered protected messages, and after how many interrupted runs a message is dead-lettered.
DEAD = "delivery.dead"
MAX_ATTEMPTS = 3

#: The queue for nudges, which no worker consumes: the harness starts the relays itself, and kills them.
NUDGES = "delivery.nudges"

#: Senders of the outbox: the shipped one, and the ones in ``tasks``.
ONCE = "idempotency.contrib.celery.send"
TWICE = "tests.delivery.tasks.send_twice"
WITHOUT_IDENTITY = "tests.delivery.tasks.send_without_identity"
MOST = "tests.delivery.tasks.send_most"
