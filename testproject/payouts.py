"""Payouts: an effect at a provider, which no transaction of this database can undo, and a row that records it.

A transaction is not enough to make a payout happen once. Three things protect it:

- The call to the provider carries a key derived from the claim, so that every attempt asks for the same payout. A
  provider that deduplicates makes it once, and one that can be asked finds it by that key.
- The call is valid for a part of the lease only. Otherwise "not found" would prove nothing, because the call may still
  be on its way, or its process may be frozen and make the call in an hour. With it, a process that acts on an
  abandoned claim knows that no earlier call can pay any more.
- The row in this database is unique by the derived key, so the first attempt or reconciler that gets there writes it.
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

#: The name of the call in its derived key.
CALL = "provider.payout"

#: The part of the lease for which a call is valid. The rest allows for differences between the clocks of this machine,
#: the provider and the database.
VALID_PART = 0.5


def pay_out(account_id: int, provider: str, *, label: str, amount: int, fault: str) -> HttpResponse:
    """Make the payout of the current claim, or find that an earlier attempt has made it.

    :returns: 201 with the payout; 402 if it was refused; 502 if it is not known, which is no outcome, so the
        operation's recovery decides what comes next.
    """
    claim = current_claim()
    assert claim is not None, "pay_out() is for views under @idempotent."
    # Read the clock first. The renewal then proves that this attempt owned the claim later than that, so no process
    # treats it as abandoned before `now` plus the lease. If the process freezes anywhere from here on, its call comes
    # too late and is refused.
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
    return _created(_keep(account_id, key, effect))


def ask_provider(record: IdempotencyRecord) -> Finding:
    """Find out what became of the abandoned attempts of a payout.

    If the provider finds no payout, the answer is ``NotExecuted``, because the calls of all earlier attempts are past
    their ``valid_until`` when their lease is over. If the provider can't be asked, the error counts as ``Unknown``.
    """
    key = record.derive_key(CALL)
    effect = find(settings.PROVIDER_URL, str(key), timeout=settings.PROVIDER_TIMEOUT)
    if effect is None:
        return NotExecuted()
    return Completed(_created(_keep(int(record.account_id), key, effect)))


def _keep(account_id: int, key: UUID, effect: Effect) -> Payout:
    """Write the row for what the provider did, unless an earlier attempt has written it."""
    values = {"account_id": account_id, "label": effect.label, "amount": effect.amount, "provider_id": effect.id}
    return Payout.objects.get_or_create(key=key, defaults=values)[0]


def _created(payout: Payout) -> HttpResponse:
    """Make the response from the row only, so that a reconciler and the handler make the same response."""
    fields = {"id": payout.pk, "provider_id": payout.provider_id, "label": payout.label, "amount": payout.amount}
    return JsonResponse(fields, status=201)
