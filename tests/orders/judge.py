"""The judge of a schedule's results. It reads the record after each step, so it has the whole history.

It relies only on the promises, the model's moves and the package's tables.
"""

from collections import Counter
from dataclasses import dataclass, field
from datetime import timedelta

from django.db.models import ExpressionWrapper
from django.http import HttpResponse

from idempotency.models import IdempotencyRecord, Now, UTCDateTimeField
from idempotency.outbox.models import MessageStatus, OutboxMessage
from testproject.harness.effects import judge_effects
from testproject.models import Transfer
from tests.harness.answers import KINDS, facts_of, recorded_facts
from tests.model.moves import Seen, is_legal

#: Ends of leases and retentions that an actor has moved are before this moment, and all others after it.
A_WHILE_AGO = ExpressionWrapper(Now() - timedelta(minutes=30), output_field=UTCDateTimeField())
COLUMNS = ("pk", "attempt", "status", "request_hash", "expires_at", "over", "lease_expires_at")
OUTCOME = ("response_status", "response_body", "response_reference")
#: The statuses of answers without an outcome.
REFUSALS = {409, 422, 503}


@dataclass
class Judge:
    """The observations, and the violations that the judge found."""

    declaration: str
    #: How many moves a step may make.
    moves: int
    #: Whether a record may be deleted before the end of its retention.
    forgets: bool = False
    problems: list[str] = field(default_factory=list)
    history: list[Seen | None] = field(default_factory=list)
    #: All outcomes that were ever recorded, by record and attempt.
    outcomes: dict[tuple[int, int], tuple] = field(default_factory=dict)
    answers: list[HttpResponse] = field(default_factory=list)

    def look(self):
        """Observe the record. Called after each step."""
        rows = list(IdempotencyRecord.objects.annotate(over=A_WHILE_AGO).values_list(*COLUMNS, *OUTCOME))
        if not rows:
            self.history.append(None)
            return
        if len(rows) > 1:
            self.problems.append(f"two records of one scope: {rows}")
        pk, attempt, status, request_hash, expires, over, lease, *recorded = rows[0]
        self.history.append(Seen(pk, attempt, status, request_hash, expires <= over))
        has_outcome = [value is not None for value in recorded] in ([True, True, False], [True, False, True])
        if (lease is not None) is not (status == "in_progress") or has_outcome is not (status == "completed"):
            self.problems.append(f"P7: an illegal state: {rows[0]}")
        elif status == "completed":
            self._note_outcome(pk, attempt, recorded)

    def _note_outcome(self, pk, attempt, recorded):
        code, *stored = recorded
        first = self.outcomes.setdefault((pk, attempt), (code, recorded_facts(*stored), stored))
        facts = first[1]
        if facts["attempt"] != attempt or code != KINDS[facts["kind"]][0]:
            self.problems.append(f"P6: attempt {attempt} owns the record, but {code} with {facts} was recorded")
        if (first[0], first[2]) != (code, stored):
            self.problems.append(f"P5: an outcome has changed from {first} to {recorded}")

    def judge_record(self, outside):
        for before, after in zip(self.history, self.history[1:], strict=False):
            if not is_legal(before, after, self.moves, forgetting=self.forgets):
                self.problems.append(f"P6: {before} became {after}")
        recorded = [(code, facts) for code, facts, _ in self.outcomes.values()]
        for answer in self.answers:
            facts = facts_of(answer.content)
            if facts is None and answer.status_code not in REFUSALS:
                self.problems.append(f"unexpected answer: {answer.status_code} {answer.content!r}")
            if facts is not None and (answer.status_code, facts) not in recorded:
                self.problems.append(f"P2: {answer.status_code} {facts} was returned but never recorded")
        kept = {facts["effect"] for _, facts in recorded if facts["kind"] != "undone"}
        effects = Counter([str(pk) for pk in Transfer.objects.values_list("pk", flat=True)] or outside)
        judged = judge_effects(effects, kept)
        if self.declaration == "inside" and judged.examples:
            self.problems.append(f"P1, P2: the effects don't match the outcomes: {judged.examples}")
        count = len(effects) if self.declaration == "again" else judged.count  # its provider deduplicates by key
        is_forgotten = self.forgets or any(map(self._is_forgotten, filter(None, self.history)))
        if count != (len(kept) if self.declaration == "inside" else 1) and not is_forgotten:
            self.problems.append(f"P1: {count} effects")

    def _is_forgotten(self, seen):
        """Whether a request after this may be a new one. The retention of an unknown outcome never ends."""
        is_unknown = self.declaration in {"ask", "park"} and seen.status in {"in_progress", "parked"}
        return seen.retention_over and not is_unknown

    def judge_messages(self, outside):
        published = [str(pk) for pk in OutboxMessage.objects.values_list("message_id", flat=True)]
        if examples := judge_effects(Counter(outside), published).examples:
            self.problems.append(f"the sent messages are not the published ones: {examples}")
        if OutboxMessage.objects.exclude(status=MessageStatus.SENT).exists():
            self.problems.append("a sent message is not marked")
