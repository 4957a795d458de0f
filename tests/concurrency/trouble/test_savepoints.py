"""Holding back the savepoints of ``atomic()`` blocks makes no difference to handlers, however the blocks end.

Each handler runs with savepoints held back and with each sent at once, as in ``test_merged_messages.py``. Handlers that
leave their transaction alone run unprotected, too.
"""

from contextlib import suppress

import pytest
from django.db import Error, connection, transaction

from testproject.models import Transfer
from tests.concurrency.savepoints import ENDINGS, SAVEPOINTS, block, one, two
from tests.concurrency.scenarios import SCENARIOS, execute
from tests.concurrency.traces import effects
from tests.concurrency.trouble.test_merged_messages import _refusals, everything, play, without_merging  # noqa: F401

pytestmark = [
    pytest.mark.postgres,
    pytest.mark.django_db(transaction=True),
    pytest.mark.usefixtures("_refusals"),
]

#: These end or change the transaction before it begins, with or without a block.
BEFORE_THE_BEGINNING = {
    *("a commit", "a commit and chain", "a prepared transaction", "a rollback", "killed_without_a_statement"),
    "the_driver_is_set_to_read_only",
}

HANDLERS = {
    **SAVEPOINTS,
    **ENDINGS,
    **{
        f"{name}, in a block": transaction.atomic(each)
        for name, each in SCENARIOS.items()
        if name not in {*BEFORE_THE_BEGINNING, "a_transaction_of_the_driver_first"}  # it commits by itself
    },
}


@pytest.mark.parametrize("name", HANDLERS)
def test_savepoints_held_back_change_nothing(name, monkeypatch):
    seen = everything(HANDLERS[name], None)
    without_merging(monkeypatch)
    assert seen == everything(HANDLERS[name], None)


@pytest.mark.parametrize("name", sorted(BEFORE_THE_BEGINNING))
def test_a_block_makes_no_difference_before_the_transaction_begins(name):
    assert everything(transaction.atomic(SCENARIOS[name]), None) == everything(SCENARIOS[name], None)


@pytest.mark.parametrize("name", SAVEPOINTS)
def test_blocks_of_a_protected_handler_are_as_unprotected(name):
    returned = []

    def handler():
        returned.append(SAVEPOINTS[name]())

    protected = everything(handler, None)
    Transfer.objects.all().delete()
    connection.rollback_exc = None
    try:
        with transaction.atomic(durable=True):
            handler()
    except Error:
        assert protected["run"] != [False, None]
    finally:
        connection.close()
    assert returned[0] == returned[1]
    if protected["run"] == [False, None]:
        assert protected["effects"] == effects()


def position_of_error(sql):
    try:
        execute(sql)
    except Error as error:
        return error.__cause__.diag.statement_position


@pytest.mark.parametrize("sql", ["SELECT 1 FORM FORM auth_user", "SELECT nothing FROM auth_user"])
def test_an_error_after_a_block_has_its_own_position(sql):
    found = []
    play(lambda: [block(one)(), found.append(position_of_error(sql))])
    connection.close()
    assert found == [position_of_error(sql)]


@pytest.mark.parametrize("before", [[], [one]], ids=["first", "after a statement"])
def test_an_interrupt_of_the_block_undoes_only_the_block(before):
    def interrupt():
        raise KeyboardInterrupt

    def handler():
        with suppress(KeyboardInterrupt):
            block(*before, interrupt)()
        two()

    assert everything(handler, None)["effects"] == ["two"]
