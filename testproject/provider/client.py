"""The payments API's client for the provider. Each call has a timeout. Its errors state whether it may have paid."""

import http.client
import json
from typing import Any
from urllib.parse import quote, urlsplit

from .ledger import Effect


class ProviderFailedError(Exception):
    """The call failed, but it may have paid."""


class PayoutRefusedError(Exception):
    """The provider refused the payout, and would refuse it again. Nothing was paid."""


def pay(
    address: str,
    key: str,
    *,
    label: str,
    amount: int,
    timeout: float,
    valid_until: float | None = None,
    fault: str = "",
) -> Effect:
    """Make a payout.

    :param timeout: seconds for the connection, and again for the response.
    :param valid_until: in seconds since 1970. From then on, the provider must not pay.
    :raises PayoutRefusedError: nothing was paid.
    :raises ProviderFailedError: the provider may have paid.
    """
    call = {"label": label, "amount": amount, "valid_until": valid_until, "fault": fault}
    status, body = _request(address, "POST", "/payouts", timeout, json.dumps(call).encode(), key)
    if status == http.HTTPStatus.PAYMENT_REQUIRED:
        raise PayoutRefusedError("The provider refused the payout.")
    if status != http.HTTPStatus.CREATED:
        raise ProviderFailedError(f"The provider answered {status}.")
    return Effect(**body)


def find(address: str, key: str, *, timeout: float) -> Effect | None:
    """The payout that was made under ``key``, or None if there is none yet."""
    status, body = _request(address, "GET", f"/payouts/{quote(key, safe='')}", timeout)
    if status == http.HTTPStatus.NOT_FOUND:
        return None
    if status != http.HTTPStatus.OK:
        raise ProviderFailedError(f"The provider answered {status}.")
    return Effect(**body["effects"][0])


def _request(address: str, method: str, path: str, timeout: float, body: bytes = b"", key: str = "") -> tuple[int, Any]:
    connection = http.client.HTTPConnection(urlsplit(address).netloc, timeout=timeout)
    try:
        connection.request(method, path, body, {"Idempotency-Key": key} if key else {})
        response = connection.getresponse()
        return response.status, json.loads(response.read())
    except (OSError, http.client.HTTPException, ValueError) as error:  # a timeout is an OSError
        raise ProviderFailedError(f"The provider did not answer: {error!r}") from error
    finally:
        connection.close()
