"""Operations that workers and the sweep must know, although they don't load the views.

The package imports this module in every process. The sample's other operations are always safe to run again, so they
are declared where they are used.
"""

from idempotency import PARK, REEXECUTE, Attach, Operation, Reconcile

from . import exports
from .payouts import ask_provider

#: The provider can be queried. The best choice for a provider that doesn't deduplicate.
PAYOUT = Operation.declare("payouts.create", transaction=False, recovery=Reconcile(ask_provider))

#: The provider deduplicates by the derived key, so it is safe to call it again.
PAYOUT_REEXECUTED = Operation.declare("payouts.reexecute", transaction=False, recovery=REEXECUTE)

#: The provider supports neither. There is at most one payout, and an operator must resolve interrupted ones.
PAYOUT_PARKED = Operation.declare("payouts.park", transaction=False, recovery=PARK)

#: Starts a job. Duplicates attach to it until it ends.
EXPORT = Operation.declare("exports.create", in_progress=Attach(exports.location_of), rebuild=exports.rebuild)
