"""The operations whose crash semantics a process must know though it has loaded no view: a worker, or the sweep.

Discovered by the package in every installed app. The other operations of the sample are declared where they are used,
because running them again is always right.
"""

from __future__ import annotations

from idempotency import PARK, REEXECUTE, Attach, Operation, Reconcile

from . import exports
from .payouts import ask_provider

#: The provider can be asked. The best there is where it doesn't deduplicate.
PAYOUT = Operation("payouts.create", transaction=False, recovery=Reconcile(ask_provider))

#: The provider deduplicates by the derived key, so calling again is safe.
PAYOUT_REEXECUTED = Operation("payouts.reexecute", transaction=False, recovery=REEXECUTE)

#: The provider can do neither. At most one payout, and somebody has to look into those that were cut off.
PAYOUT_PARKED = Operation("payouts.park", transaction=False, recovery=PARK)

#: Starts a job, to which its duplicates attach until it ends.
EXPORT = Operation("exports.create", in_progress=Attach(exports.location_of), rebuild=exports.rebuild)
