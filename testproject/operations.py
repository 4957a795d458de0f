"""The operations that a worker or the sweep must know, although such a process has loaded no view.

The package imports this module in every process. The other operations of the sample are declared where they are used,
because it is always safe to run them again.
"""

from idempotency import PARK, REEXECUTE, Attach, Operation, Reconcile

from . import exports
from .payouts import ask_provider

#: The provider can be asked. This is the best choice for a provider that doesn't deduplicate.
PAYOUT = Operation("payouts.create", transaction=False, recovery=Reconcile(ask_provider))

#: The provider deduplicates by the derived key, so calling again is safe.
PAYOUT_REEXECUTED = Operation("payouts.reexecute", transaction=False, recovery=REEXECUTE)

#: The provider can do neither. There is at most one payout, and a person has to look into those that were cut off.
PAYOUT_PARKED = Operation("payouts.park", transaction=False, recovery=PARK)

#: Starts a job, to which its duplicates attach until it ends.
EXPORT = Operation("exports.create", in_progress=Attach(exports.location_of), rebuild=exports.rebuild)
