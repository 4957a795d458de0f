"""Names shared by the harness and its processes. The harness does not load Django."""

#: The tasks: one that is protected, and its control.
KEPT = "delivery.kept"
PLAIN = "delivery.plain"

#: The queue in which protected messages are dead-lettered, and how many runs of one may be cut off until it is.
DEAD = "delivery.dead"
MAX_ATTEMPTS = 3

#: The queue for nudges, which no worker consumes: the harness starts the relays itself, and kills them.
NUDGES = "delivery.nudges"

#: Senders of the outbox: the shipped one, and the ones in ``tasks``.
ONCE = "idempotency.contrib.celery.send"
TWICE = "tests.delivery.tasks.send_twice"
WITHOUT_IDENTITY = "tests.delivery.tasks.send_without_identity"
MOST = "tests.delivery.tasks.send_most"
