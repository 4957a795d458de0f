"""Deliberately broken variants of the package, each applied by a ``MonkeyPatch`` in one worker's process only.

The harness must detect every one. They name the package's internals, so a rename there must be repeated here. A
mutation that changes nothing raises an error.
"""

import time
from contextlib import contextmanager
from dataclasses import replace

from django.db import transaction

from idempotency import lifecycle
from idempotency.lifecycle import Decision, Recovery, Status
from idempotency.operate import sweep
from idempotency.protocol import acquisition, execution, ownership, recovery, steps
from idempotency.protocol.claim import Claim
from idempotency.store.postgresql import statements

MUTATIONS = {}


def mutation(apply):
    MUTATIONS[apply.__name__] = apply
    return apply


def rewrite(patch, old, new, *names):
    for name in names:
        statement = getattr(statements, name)
        if old not in statement:
            raise LookupError(f"postgresql.{name} has no {old!r} for a mutation to break")
        patch.setattr(statements, name, statement.replace(old, new))


@mutation
def without_attempt(patch):
    """No attempt in the compare-and-set."""
    fenced = ("COMPLETE", "COMPLETE_AND_COMMIT", "RELEASE", "SET_LEASE", "PARK")
    rewrite(patch, "AND attempt = %s", "AND attempt > -%s", *fenced)


@mutation
def completion_after_the_commit(patch):
    """The outcome is recorded in a transaction after the business transaction."""

    @contextmanager
    def in_transaction(owned):
        with transaction.atomic(using=owned.using, durable=True):
            yield
        ownership.record(owned, owned.outcome)
        owned.end = ownership.End.COMMITTED

    patch.setattr(execution, "_in_transaction", in_transaction)


@mutation
def release_unfenced(patch):
    """An error path releases any claim it finds."""
    rewrite(patch, "AND attempt = %s", "AND attempt > -%s", "RELEASE")
    rewrite(patch, "AND status || '' = 'in_progress'", "", "RELEASE")


@mutation
def clock_of_the_application(patch):
    """Leases are judged by the querying process's clock."""
    changed = [name for name in vars(statements) if "statement_timestamp()" in str(getattr(statements, name))]
    rewrite(patch, "statement_timestamp()", f"to_timestamp({time.time()})", *changed)


@mutation
def park_runs_again(patch):
    """Recovery runs an operation again that is declared PARK."""
    patch.setitem(lifecycle._ABANDONED, Recovery.PARK, Decision.TAKE_OVER)
    patch.setitem(sweep._SETTLED_AS, Recovery.PARK, Status.RECOVERABLE)


@mutation
def retention_ends_the_unknown(patch):
    """A parked record, or a claim that must be reconciled or parked, is started over past its retention."""
    decide = lifecycle.decide

    def decide_by_age(status, **facts):
        is_live = status is Status.IN_PROGRESS and not facts["lease_over"]
        return decide(Status.RECOVERABLE if facts["retention_over"] and not is_live else status, **facts)

    patch.setattr(acquisition, "decide", decide_by_age)
    rewrite(patch, "IN ('completed', 'recoverable')", "IN ('completed', 'recoverable', 'parked')", "START_OVER")


@mutation
def step_unfenced(patch):
    """A step runs without proof that its attempt still owns the record."""
    patch.setattr(steps, "prove_ownership", lambda owned: None)


@mutation
def take_over_of_live_claims(patch):
    """A claim is taken over whether or not its lease is over."""
    decide = lifecycle.decide
    patch.setattr(acquisition, "decide", lambda status, **facts: decide(status, **{**facts, "lease_over": True}))
    rewrite(patch, "AND lease_expires_at <= statement_timestamp()", "", "TAKE_OVER")


@mutation
def not_executed_is_assumed(patch):
    """Recovery assumes that an abandoned operation was not executed."""
    patch.setattr(recovery, "_call_reconciler", lambda claim: recovery.NotExecuted())


@mutation
def key_of_the_attempt(patch):
    """Each attempt calls the provider under a different key."""
    derive = Claim.derive_key
    patch.setattr(Claim, "derive_key", lambda claim, name: derive(claim, f"{name} {claim.attempt}"))


@mutation
def refusal_unfenced(patch):
    """An outcome of 400 and more is recorded for whichever attempt owns the record."""
    complete = ownership.complete

    def complete_any(owned, outcome, **options):
        if outcome.status >= 400 and (row := owned.store.read(owned.scope)) is not None:
            owned = replace(owned, fence=row.fence)
        complete(owned, outcome, **options)

    patch.setattr(ownership, "complete", complete_any)
