"""Paying somebody out: an effect at a provider, which no transaction of ours can undo, and a row of our own for it.

A payout needs more than a transaction to happen once. What protects it:

- The call to the provider carries a key derived from the claim, so that every attempt asks for the same payout: a
  provider that deduplicates makes it once, and one that can be asked is asked for it by that key.
- The call is valid for a part of the lease only. Without that, "not found" would prove nothing: the call may still be
  on its way, or its process may be frozen and make it in an hour. With it, whoever acts on an abandoned claim knows
  that no earlier call can pay any more.
- Our own row is unique by the derived key, so it is written once, by whichever attempt or reconciler gets there.
"""

from __future__ import annotations

import time
from uuid import UUID, uuid4

from django.conf import settings
from django.http import HttpResponse, JsonResponse

from idempotency import Completed, NotExecuted, current_claim
from idempotency.models import IdempotencyRecord
from idempotency.options.values import Finding

from .models import BasePayout, Payout, UnprotectedPayout
from .provider.client import PayoutRefusedError, ProviderFailedError, find, pay
from .provider.ledger import Effect

#: The name of the one call that a payout makes, for its derived key.
CALL = "provider.payout"

#: The part of the lease for which a call is valid. What is left is how far the clocks of this machine, the provider and
#: the database may be apart.
VALID_PART = 0.5


def pay_out(account_id: int, label: str, amount: int, fault: str, provider: str) -> HttpResponse:
    """Make the payout of the current claim, or find that an earlier attempt has made it.

    201 with the payout, 402 if it was refused; 502 if nobody knows, which is no outcome: what comes next is for the
    operation's recovery to decide.
    """
    claim = current_claim()
    assert claim is not None, "pay_out() is for views under @idempotent."
    # The clock is read first. Renewing then proves that the claim was owned later than that, so nobody acts on it as
    # abandoned before `now` plus the lease. A process that is frozen anywhere from here on calls in vain.
    now = time.time()
    claim.renew()
    lease = claim.operation.lease.total_seconds()
    key = claim.derive_key(CALL)
    return _answer(account_id, key, label, amount, fault, provider, valid_until=now + VALID_PART * lease, model=Payout)


def pay_out_unprotected(account_id: int, label: str, amount: int, fault: str, provider: str) -> HttpResponse:
    """The same work as it is done without protection: each request is a payout of its own."""
    return _answer(account_id, uuid4(), label, amount, fault, provider, valid_until=None, model=UnprotectedPayout)


def ask_provider(record: IdempotencyRecord) -> Finding:
    """What became of the abandoned attempts at a payout.

    Not found is not executed, because the calls of all earlier attempts are past their ``valid_until`` by the time that
    their lease is over. A provider that can't be asked raises, which is an ``Unknown``.
    """
    key = record.derive_key(CALL)
    effect = find(settings.PROVIDER_URL, str(key), timeout=settings.PROVIDER_TIMEOUT)
    if effect is None:
        return NotExecuted()
    return Completed(_created(_keep(int(record.account_id), key, effect, Payout)))


def _answer(
    account_id: int,
    key: UUID,
    label: str,
    amount: int,
    fault: str,
    provider: str,
    *,
    valid_until: float | None,
    model: type[BasePayout],
) -> HttpResponse:
    timeout = settings.PROVIDER_TIMEOUT
    try:
        effect = pay(
            provider, str(key), label=label, amount=amount, timeout=timeout, valid_until=valid_until, fault=fault
        )
    except PayoutRefusedError as error:
        return JsonResponse({"detail": str(error), "code": "payout_refused"}, status=402)
    except ProviderFailedError as error:
        return JsonResponse({"detail": str(error), "code": "provider_failed"}, status=502)
    return _created(_keep(account_id, key, effect, model))


def _keep(account_id: int, key: UUID, effect: Effect, model: type[BasePayout]) -> BasePayout:
    """Our row for what the provider did, written by the first who gets here."""
    values = {
        "account_id": account_id,
        "label": effect.label,
        "amount": effect.amount,
        "provider_id": effect.id,
    }
    payout: BasePayout = model._default_manager.get_or_create(key=key, defaults=values)[0]
    return payout


def _created(payout: BasePayout) -> HttpResponse:
    """Made of the row alone, so that a reconciler answers as the handler would have."""
    created = {
        "id": payout.pk,
        "provider_id": payout.provider_id,
        "label": payout.label,
        "amount": payout.amount,
    }
    return JsonResponse(created, status=201)
