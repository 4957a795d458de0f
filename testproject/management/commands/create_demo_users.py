"""``manage.py create_demo_users``: creates the users alice and bob, and their tokens."""

from typing import Any

from django.contrib.auth import get_user_model
from django.core.management.base import BaseCommand
from rest_framework.authtoken.models import Token

DEMO_USERS = ("alice", "bob")


class Command(BaseCommand):
    help = "Create the demo users alice and bob, each with a token, and print the tokens. Safe to run again."

    def handle(self, *args: Any, **options: Any) -> None:
        for username, token in create_demo_users().items():
            self.stdout.write(f"{username}: Authorization: Token {token}")


def create_demo_users() -> dict[str, str]:
    """Create missing demo users and tokens, and return the tokens by username."""
    tokens = {}
    for username in DEMO_USERS:
        # No password, because they only call the API.
        user, _ = get_user_model()._default_manager.get_or_create(username=username)
        token, _ = Token.objects.get_or_create(user=user)
        tokens[username] = token.key
    return tokens
