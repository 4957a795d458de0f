"""Rows that tests start from. What a test is about it says itself; the factories fill in the rest."""

from datetime import timedelta
from typing import Any

import factory
from django.contrib.auth.models import User
from django.db.models.functions import Now
from factory.django import DjangoModelFactory
from rest_framework.authtoken.models import Token

from idempotency.lifecycle import Status
from idempotency.models import IdempotencyRecord
from testproject.models import Charge
from tests.records import from_now


class UserFactory(DjangoModelFactory):
    class Meta:
        model = User

    username = factory.Sequence(lambda number: f"user-{number}")


class TokenFactory(DjangoModelFactory):
    class Meta:
        model = Token

    user = factory.SubFactory(UserFactory)


class ChargeFactory(DjangoModelFactory):
    class Meta:
        model = Charge

    account = factory.SubFactory(UserFactory)
    amount = 1000
    currency = "usd"


class RecordFactory(DjangoModelFactory):
    """A claim that is alive, unless a trait says otherwise. Its times are the database's."""

    class Meta:
        model = IdempotencyRecord

    account_id = "1"
    operation = "charges.create"
    idempotency_key = factory.Sequence(lambda number: f"key-{number}")
    request_hash = "v1:" + 64 * "0"
    status = Status.IN_PROGRESS
    lease_expires_at: Any = factory.LazyFunction(lambda: from_now(timedelta(minutes=1)))
    expires_at: Any = factory.LazyFunction(lambda: from_now(timedelta(days=3)))

    class Params:
        abandoned = factory.Trait(lease_expires_at=factory.LazyFunction(lambda: from_now(-timedelta(minutes=1))))
        recoverable = factory.Trait(status=Status.RECOVERABLE, lease_expires_at=None)
        parked = factory.Trait(status=Status.PARKED, lease_expires_at=None)
        completed = factory.Trait(
            status=Status.COMPLETED,
            lease_expires_at=None,
            response_status=201,
            response_headers=[["Content-Type", "application/json"]],
            response_body='{"id": 1}',
            completed_at=factory.LazyFunction(Now),
        )
        past_retention = factory.Trait(expires_at=factory.LazyFunction(lambda: from_now(-timedelta(hours=1))))
