"""What tests declare, and have to leave as they found it."""

from contextlib import contextmanager
from dataclasses import replace
from functools import cache

from django.db import connection

from idempotency import Operation
from idempotency.operation import registry


def forget_operation(name):
    registry._operations.pop(name, None)
    registry._homes.pop(name, None)
    registry._of_requests.discard(name)


@contextmanager
def forgetting_operations(prefix=""):
    """Forget what is declared in the block, or what of it has the prefix, so that another test may use the name."""
    before = {operation.name for operation in registry}
    homes = dict(registry._homes)
    try:
        yield
    finally:
        for operation in list(registry):
            if operation.name not in before and operation.name.startswith(prefix):
                forget_operation(operation.name)
        registry._homes.update(homes)


def redeclare(monkeypatch, name, **options):
    """Let an operation have other options, as in a later release of its project."""
    policy_of = vars(Operation)["policy"].fget

    @cache
    def policy(operation):
        return replace(policy_of(operation), **(options if operation.name == name else {}))

    monkeypatch.setattr(Operation, "policy", property(policy))


@contextmanager
def free_names():
    """Let functions in the block have the names of operations that others have, as examples do in the documentation."""
    with forgetting_operations():
        registry._homes.clear()
        yield


@contextmanager
def receiving(signal, then=lambda: None):
    """The arguments with which the signal is sent in the block, each time outside of transactions."""
    received = []
    in_transaction = []

    def receive(**arguments):
        received.append(arguments)
        in_transaction.append(connection.in_atomic_block)
        then()

    signal.connect(receive)
    try:
        yield received
    finally:
        signal.disconnect(receive)  # a weak reference ends with the garbage collection, in another test
    assert not any(in_transaction)
