"""Payouts: an effect at a provider, which no database transaction can undo, and a row that records it.

Three things make sure that a payout happens only once:

- The call to the provider carries a key derived from the claim, so that every attempt requests the same payout. A
  provider that deduplicates makes it once. A provider that can be queried finds it by that key.
- The call is only valid for a part of the lease. Otherwise "not found" would prove nothing, because the call might
  still be in transit, or its process might be frozen and make the call an hour later. With the limit, a process that
  recovers an abandoned claim knows that no earlier call can pay any more.
- The row in this database is committed together with the outcome, after ``begin()``. It is unique by the derived key,
  because a reconciler writes it, too, for an attempt that was killed after its call.
"""

import time
from uuid import UUID

from django.conf import settings
from django.http import HttpResponse, JsonResponse

from idempotency import Completed, Finding, NotExecuted, current_claim
from idempotency.models import IdempotencyRecord

from .models import Payout
from .provider.client import PayoutRefusedError, ProviderFailedError, find, pay
from .provider.ledger import Effect

#: The call's name in its derived key.
CALL = "provider.payout"

#: The part of the lease for which a call is valid. The rest allows for clock differences between this machine, the
#: provider and the database.
VALID_PART = 0.5


def pay_out(account_id: int, provider: str, *, label: str, amount: int, fault: str) -> HttpResponse:
    """Make the current claim's payout, or find the one that an earlier attempt made.

    :returns: 201 with the payout; 402 if the provider refused it; 502 if the result is unknown. A 502 is not recorded
        as an outcome, so the operation's recovery decides what happens next.
    """
    claim = current_claim()
    assert claim is not None, "pay_out() is for views under @idempotent."
    # Read the clock before the renewal. A successful renewal proves that this attempt owned the claim after `now`, so
    # no process treats it as abandoned before `now` plus the lease. If this process freezes anywhere from here on, its
    # call is too late and is refused.
    now = time.time()
    claim.renew()
    valid_until = now + VALID_PART * claim.operation.policy.lease.total_seconds()
    key, timeout = claim.derive_key(CALL), settings.PROVIDER_TIMEOUT
    try:
        effect = pay(
            provider, str(key), label=label, amount=amount, timeout=timeout, valid_until=valid_until, fault=fault
        )
    except PayoutRefusedError as error:
        return JsonResponse({"detail": str(error), "code": "payout_refused"}, status=402)
    except ProviderFailedError as error:
        return JsonResponse({"detail": str(error), "code": "provider_failed"}, status=502)
    claim.begin()
    return _created(_keep(account_id, key, effect))


def ask_provider(record: IdempotencyRecord) -> Finding:
    """Determine whether an abandoned attempt made the payout.

    If the provider finds no payout, the finding is ``NotExecuted``, because all earlier calls are past their
    ``valid_until`` once the lease is over. If the query fails, the error counts as ``Unknown``.
    """
    key = record.derive_key(CALL)
    effect = find(settings.PROVIDER_URL, str(key), timeout=settings.PROVIDER_TIMEOUT)
    if effect is None:
        return NotExecuted()
    return Completed(_created(_keep(int(record.account_id), key, effect)))


def _keep(account_id: int, key: UUID, effect: Effect) -> Payout:
    """Write the payout's row, unless another attempt or reconciler has written it."""
    values = {"account_id": account_id, "label": effect.label, "amount": effect.amount, "provider_id": effect.id}
    return Payout.objects.get_or_create(key=key, defaults=values)[0]


def _created(payout: Payout) -> HttpResponse:
    """Build the response from the row alone, so that the handler and a reconciler return the same response."""
    fields = {"id": payout.pk, "provider_id": payout.provider_id, "label": payout.label, "amount": payout.amount}
    return JsonResponse(fields, status=201)
