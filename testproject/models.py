"""The sample API's effects. Each row is one effect, so counting rows counts effects."""

from django.conf import settings
from django.core.validators import MaxValueValidator, MinValueValidator, RegexValidator
from django.db import models

#: The largest amount, in the currency's minor unit. Small enough that sums also fit into a bigint.
MAX_AMOUNT = 10**12
AMOUNTS = [MinValueValidator(1), MaxValueValidator(MAX_AMOUNT)]


class Effect(models.Model):
    """An effect that must not happen twice.

    ``label`` is the client's name for the logical operation. It is not unique, and no view uses it. Rows with the same
    label are effects of the same operation.
    """

    account = models.ForeignKey(settings.AUTH_USER_MODEL, on_delete=models.CASCADE, related_name="+")
    label = models.CharField(max_length=128, blank=True, default="", db_index=True)
    created_at = models.DateTimeField(auto_now_add=True)

    class Meta:
        abstract = True


class BaseCharge(Effect):
    amount = models.BigIntegerField(validators=AMOUNTS)
    currency = models.CharField(max_length=3, validators=[RegexValidator(r"\A[a-z]{3}\Z")])
    # A unique field breaks unprotected retries, because the validator finds the first attempt's row.
    reference = models.CharField(max_length=64, unique=True, null=True)  # noqa: DJ001 - NULLs don't collide

    class Meta:
        abstract = True

    def __str__(self) -> str:
        return f"{self.amount} {self.currency}"


class Charge(BaseCharge):
    """A charge made under an idempotency key."""


class UnprotectedCharge(BaseCharge):
    """A charge made by the unprotected control."""


class Transfer(Effect):
    recipient = models.CharField(max_length=64)
    amount = models.BigIntegerField(validators=AMOUNTS)

    def __str__(self) -> str:
        return f"{self.amount} to {self.recipient}"


class Notification(Effect):
    recipient = models.CharField(max_length=64)
    message = models.TextField()

    def __str__(self) -> str:
        return f"to {self.recipient}"


class Payout(Effect):
    """A record of a payout. The effect itself is in the provider's ledger, as ``provider_id``."""

    # The key sent to the provider. It is the same for every attempt, so each payout has one row.
    key = models.UUIDField(unique=True)
    provider_id = models.BigIntegerField()
    amount = models.BigIntegerField()

    def __str__(self) -> str:
        return f"{self.amount} under {self.key}"


class Export(Effect):
    """The sum of an account's charges, calculated by a job."""

    # Derived from the request's scope, because a duplicate may need the URL before the first request has committed.
    id = models.UUIDField(primary_key=True)
    charges = models.BigIntegerField(null=True)
    total = models.BigIntegerField(null=True)
    #: How often the job has taken effect. Must be at most one.
    runs = models.PositiveIntegerField(default=0)
    finished_at = models.DateTimeField(null=True)

    def __str__(self) -> str:
        return f"{self.id}: {self.state}"

    @property
    def state(self) -> str:
        return "running" if self.finished_at is None else "finished"


class BaseReceipt(models.Model):
    """A receipt that a worker sent. Each message is one logical receipt, named by ``label``."""

    label = models.CharField(max_length=128, db_index=True)
    amount = models.BigIntegerField()
    created_at = models.DateTimeField(auto_now_add=True)

    class Meta:
        abstract = True

    def __str__(self) -> str:
        return f"{self.label}: {self.amount}"


class Receipt(BaseReceipt):
    """Sent by an idempotent task."""


class UnprotectedReceipt(BaseReceipt):
    """Sent by the unprotected control task."""
