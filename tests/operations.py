"""Operations and signal receivers that exist only during a test."""

from contextlib import contextmanager
from dataclasses import replace

from django.db import connection

from idempotency.operation import registry


def forget_operation(name):
    registry._operations.pop(name, None)
    registry._homes.pop(name, None)
    registry._of_requests.discard(name)
    registry._with_key.discard(name)


@contextmanager
def forgetting_operations(prefix=""):
    """Forget the operations declared in the block whose names have the prefix, so that another test may reuse them."""
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
    """Give an operation other options, as a later release of its project would."""
    operation = registry.get(name)
    monkeypatch.setitem(vars(operation), "policy", replace(operation.policy, **options))


@contextmanager
def free_names():
    """Let functions in the block reuse the names of existing operations, as the documentation's examples do."""
    with forgetting_operations():
        registry._homes.clear()
        yield


@contextmanager
def receiving(signal, then=lambda: None):
    """Yield a list of the arguments of each time the signal is sent. It must be sent outside transactions."""
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
        signal.disconnect(receive)  # a weak reference may live on into another test
    assert not any(in_transaction)
