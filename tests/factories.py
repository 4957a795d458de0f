"""Rows that tests start from. A test sets the fields that matter, and the factories fill in the rest."""

import factory
from django.contrib.auth.models import User
from factory.django import DjangoModelFactory
from rest_framework.authtoken.models import Token

from testproject.models import Charge


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
