"""What is sent to a database that has the extension Citus. ``tests/scale/citus.py`` runs all of it on a cluster."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from datetime import datetime, timedelta, timezone
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock
from uuid import uuid4

import pytest
from django.core.management import CommandError, call_command
from django.db import NotSupportedError, OperationalError, connection

from idempotency import sql
from idempotency.checks import check_databases
from idempotency.identity.scope import Scope
from idempotency.lifecycle import Status
from idempotency.models import IdempotencyRecord
from idempotency.outcome import Outcome
from idempotency.sql import Fence, Part
from idempotency.sql.postgresql.citus import Shard
from idempotency.sql.postgresql.store import PostgreSQLStore

SCOPE = Scope("1", "unit.citus", "key")
HASH = "v1:" + "0" * 64
FENCE = Fence(SCOPE, 7, 1, HASH)
DAY = timedelta(days=1)
NOW = datetime(2026, 1, 1, tzinfo=timezone.utc)

WAITS = "SET LOCAL lock_timeout TO '1000ms'"
IDLES = "SET LOCAL idle_in_transaction_session_timeout TO '5000ms'"
NO_DISK = "SET LOCAL synchronous_commit TO 'off'"


class Scripted:
    """A connection that remembers what is sent and answers from a script: part of a statement → rows."""

    alias = "default"
    display_name = "PostgreSQL"
    answer_for_accounts: Callable[[list[str]], list[tuple[int, str]]]

    def __init__(self, answers: dict[str, Any], *, extension: bool = True, binding: bool = False) -> None:
        self.answers = {"pg_extension": [(extension,)], "partmethod": [(1,)], "pg_partition_tree": [], **answers}
        self.sent: list[str] = []
        self.savepoint_ids: list[str] = []
        self.settings_dict = {"HOST": "", "PORT": "", "NAME": uuid4()}  # a place of its own
        self.features = SimpleNamespace(
            uses_server_side_binding=binding, has_select_for_update_skip_locked=connection.vendor == "postgresql"
        )
        self.ops = SimpleNamespace(compose_sql=lambda statement, parameters: statement)
        self.introspection = SimpleNamespace(table_names=lambda cursor: ["idempotency_record", "auth_user", "other"])
        self.connection = SimpleNamespace(autocommit=False, execute=self.execute)
        self.wrap_database_errors = nullcontext()

    def ensure_connection(self) -> None: ...

    def cursor(self) -> Any:
        return nullcontext(self)

    def execute(self, statement: str, parameters: Any = None) -> Any:
        self.sent.append(statement)
        if "get_shard_id" in statement:
            rows = self.answer_for_accounts(parameters[1])
            self.fetchall = lambda: rows
            return self
        rows = next((rows for part, rows in self.answers.items() if part in statement), [(7,)])
        self.fetchall = lambda: rows
        self.fetchone = lambda: rows[0]
        self.rowcount = len(rows)
        return self

    def nextset(self) -> bool:
        return True


def scripted(answers: dict[str, Any] | None = None, **options: Any) -> tuple[Any, Any]:
    made: Any = Scripted(answers or {}, **options)
    return made, PostgreSQLStore(made)


def claim(store: Any, **options: Any) -> Any:
    return store.insert_claim(SCOPE, HASH, lease=DAY, ttl=DAY, **options)


def complete(store: Any) -> Any:
    return store.complete(FENCE, Outcome(201, [], "{}", None), ttl=DAY)


@pytest.mark.failure_mode(2)
@pytest.mark.parametrize(
    ("call", "alone", "settings"),
    [
        (lambda store: claim(store, wait_for_disk=True), True, [WAITS]),
        (lambda store: claim(store, wait_for_disk=False), True, [WAITS, NO_DISK]),
        (lambda store: claim(store, wait_for_disk=True), False, [WAITS, IDLES]),
        (complete, True, [WAITS]),
        (complete, False, [IDLES]),
        (lambda store: store.release(FENCE), True, [WAITS]),
        (lambda store: store.park(FENCE), False, [WAITS, IDLES]),
    ],
)
@pytest.mark.parametrize("binding", [False, True])
def test_settings_reach_the_workers_in_the_message_of_the_statement_unless_the_server_binds_the_parameters(
    call: Callable[[Any], Any], alone: bool, settings: list[str], binding: bool
) -> None:
    made, store = scripted(binding=binding)
    made.connection.autocommit = alone
    assert call(store)
    question, *messages = made.sent
    assert "pg_extension" in question
    block, _, statement = messages[0].partition("END $$") if not binding else (messages[0], "", messages[1])
    assert block.count("SET LOCAL") == 1 + len(settings)
    assert block.startswith("DO $$ BEGIN SET LOCAL citus.propagate_set_commands TO 'local'")
    assert all(setting in block for setting in settings)
    assert "idempotency_record" in statement
    assert "set_config" not in statement
    assert len(messages) == 1 + binding


@pytest.mark.failure_mode(2)
@pytest.mark.parametrize("extension", [False, True])
def test_counts_wait_for_a_bounded_time_on_the_workers_too(extension: bool) -> None:
    made, store = scripted(extension=extension)
    store.add_counts({("unit.citus", "claimed"): 1}, 1)
    (message,) = made.sent[1:]
    assert (WAITS in message, NO_DISK in message) == (extension, extension)
    assert "idempotency_counter" in message


@pytest.mark.parametrize(
    ("extension", "binding", "alone"), [(True, False, True), (True, True, False), (False, True, True)]
)
def test_a_claim_is_its_own_transaction_unless_its_settings_are_a_message_of_their_own(
    extension: bool, binding: bool, alone: bool
) -> None:
    made, store = scripted(extension=extension, binding=binding)
    store.commit_at_once()
    assert made.connection.autocommit is alone


def test_a_database_is_asked_once_for_the_extension() -> None:
    made, store = scripted(extension=False)
    assert claim(store, wait_for_disk=True) == claim(store, wait_for_disk=True) == 7
    assert ["pg_extension" in statement for statement in made.sent] == [True, False, False]
    assert store.parts() == [Part()]


@pytest.mark.django_db
@pytest.mark.failure_mode(9)
@pytest.mark.parametrize(
    ("limit", "locked"), [(None, [["a", "d"], ["b", "c"]]), (2, [["a"], ["b"], ["c"]]), (9, [["a", "d"], ["b", "c"]])]
)
def test_rows_of_shards_are_locked_in_one_shard_after_the_other_and_locked_ones_are_passed_over(
    limit: int | None, locked: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, store = scripted()
    of_accounts = {"a": 1, "d": 1, "b": 2, "c": 2}
    made.answer_for_accounts = lambda accounts: [(of_accounts[account], account) for account in accounts]
    for account in "abcde":
        IdempotencyRecord.objects.create(
            account_id=account, operation="unit.citus", idempotency_key="k", request_hash=HASH, expires_at=NOW
        )
    asked: list[list[str]] = []

    def lock(self: Any, rows: Any, limit: int | None = None) -> list[str]:
        asked.append(sorted(rows.values_list("account_id", flat=True)))
        return [account for account in asked[-1] if account != "b"]  # another transaction has locked it

    monkeypatch.setattr(sql.Store, "lock_free", lock)
    rows = IdempotencyRecord.objects.exclude(account_id="e").order_by("pk").values_list("account_id", flat=True)
    assert sorted(store.lock_free(rows, limit)) == (["a", "c"] if limit == 2 else ["a", "c", "d"])
    assert asked == locked


@pytest.mark.django_db
def test_rows_of_a_table_that_is_not_distributed_are_locked_at_once() -> None:
    made, store = scripted({"partmethod": [(0,)]})
    assert store.lock_free(IdempotencyRecord.objects.all(), 1) == []
    assert not any("get_shard_id" in statement for statement in made.sent)


SHARDS = {"pg_dist_shard AS": [("record_1", "step_1", 1), ("record_2", "step_2", 2)]}
PLACE = {"pg_dist_shard_placement": [("worker", 5432, "2026-01-01")]}


def answer(deleted: int, found: int) -> dict[str, Any]:
    return {**SHARDS, **PLACE, "master_run": [(True, json.dumps([deleted, found, "2026-01-01T00:00:00+00:00"]))]}


def delete(store: Any, part: Part, limit: int) -> Any:
    return store.delete_due(store.find_due(part, limit, NOW), [Status.COMPLETED], limit)


def test_a_shard_is_purged_by_its_worker_and_by_the_clock_of_the_coordinator() -> None:
    made, store = scripted(answer(2, 3))
    made.ops.compose_sql = lambda statement, parameters: made.sent.append(statement)
    assert store.parts() == [Shard("record_1", "step_1", 1), Shard("record_2", "step_2", 2)]
    batch = delete(store, store.parts()[0], 3)
    assert (batch.deleted, batch.exhausted, batch.reached) == (2, False, NOW)
    (command,) = (statement for statement in made.sent if "DELETE FROM record_1" in statement)
    assert "DELETE FROM step_1" in command
    assert "statement_timestamp()" not in command
    assert "'2026-01-01'::timestamptz" in command


def test_the_bodies_of_a_shard_are_purged_by_its_worker() -> None:
    made, store = scripted(answer(2, 3))
    made.ops.compose_sql = lambda statement, parameters: made.sent.append(statement)
    batch = store.delete_bodies(store.parts()[0], 3, None)
    assert (batch.deleted, batch.exhausted, batch.reached) == (2, False, NOW)
    (command,) = (statement for statement in made.sent if "UPDATE record_1" in statement)
    assert "DELETE FROM step_1" in command
    assert "statement_timestamp()" not in command
    _, refusing = scripted({**SHARDS, **PLACE, "master_run": [(False, "ERROR: no")]})
    with pytest.raises(OperationalError, match="Server worker refused: ERROR: no"):
        refusing.delete_bodies(refusing.parts()[0], 3, None)


def test_a_refusal_of_a_worker_is_an_error_of_the_database() -> None:
    _, store = scripted({**SHARDS, **PLACE, "master_run": [(False, "ERROR: no")]})
    with pytest.raises(OperationalError, match="Server worker refused: ERROR: no"):
        delete(store, store.parts()[0], 3)


@pytest.mark.parametrize(("found", "deleted", "exhausted"), [(3, 6, True), (10, 3, False)])
def test_a_batch_of_the_whole_table_takes_its_shards_until_it_is_full(
    found: int, deleted: int, exhausted: bool
) -> None:
    _, store = scripted(answer(3, found))
    batch = delete(store, Part(), 10)
    assert (batch.deleted, batch.exhausted, batch.reached) == (deleted, exhausted, NOW)


def test_the_size_is_the_sum_over_the_shards() -> None:
    _, store = scripted({"run_command_on_shards": [(4096, 12.0)]})
    assert store.measure() == sql.TableSize(4096, 12)


CLUSTER = "pg_dist_local_group"
KNOWN = "JOIN pg_class ON pg_class.oid = logicalrelid"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"extension": False}, "has no extension citus"),
        ({"answers": {CLUSTER: [(1, 2)]}}, "on a worker"),
        ({"answers": {CLUSTER: [(0, 0)]}}, "no server for shards"),
    ],
)
def test_what_can_not_be_distributed_is_refused(options: dict[str, Any], said: str) -> None:
    _, store = scripted(**options)
    with pytest.raises(NotSupportedError, match=said):
        store.plan_distribution()


@pytest.mark.parametrize(
    ("known", "planned"),
    [
        ([], ["record", "record", "step", "step", "counter", "counter", "outbox"]),
        (["idempotency_record", "idempotency_step"], ["counter", "counter", "outbox"]),
        (["idempotency_record", "idempotency_step", "idempotency_counter", "idempotency_outbox"], []),
    ],
)
def test_tables_that_are_distributed_already_are_left_alone(known: list[str], planned: list[str]) -> None:
    _, store = scripted({CLUSTER: [(0, 2)], KNOWN: [(name,) for name in known]})
    statements = store.plan_distribution()
    assert [statement.partition("idempotency_")[2].partition("'")[0] for statement in statements] == planned


@pytest.fixture
def distributed(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The store of the database, as if it had just two statements to send."""
    store = sql.store("default")
    monkeypatch.setattr(store, "plan_distribution", MagicMock(return_value=["SELECT 1", "SELECT 2"]), raising=False)
    monkeypatch.setattr(store, "tables_outside_of_citus", MagicMock(return_value=["shop_order"]), raising=False)
    return store


@pytest.mark.django_db(transaction=True)
def test_the_command_distributes_and_says_which_tables_are_left(
    distributed: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    call_command("idempotency_distribute")
    said = capsys.readouterr()
    assert said.out == "The tables in database 'default' are distributed.\n"
    assert "shop_order" in said.err
    distributed.plan_distribution.return_value = []
    distributed.tables_outside_of_citus.return_value = []
    call_command("idempotency_distribute")
    call_command("idempotency_distribute", verbosity=0)
    assert capsys.readouterr() == ("The tables in database 'default' were distributed already.\n", "")
    distributed.plan_distribution.return_value = ["SELECT 1"]
    call_command("idempotency_distribute", "--dry-run")
    assert capsys.readouterr().out == "BEGIN;\nSELECT 1;\nCOMMIT;\n"


@pytest.mark.django_db
def test_the_command_refuses_a_database_without_citus() -> None:
    with pytest.raises(CommandError, match=r"has no extension citus|can't be distributed"):
        call_command("idempotency_distribute", database="default")


@pytest.mark.django_db
def test_tables_that_citus_does_not_know_are_a_warning_because_a_crash_could_lose_their_writes(
    distributed: Any,
) -> None:
    messages = check_databases(None, databases=["default"])
    assert [(message.id, "shop_order" in message.msg) for message in messages] == [("idempotency.W014", True)]
    assert check_databases(None) == []


def test_only_tables_of_the_project_s_models_that_exist_count_as_left() -> None:
    _, store = scripted({KNOWN: [("idempotency_record",)]})
    assert store.tables_outside_of_citus() == ["auth_user"]
    _, store = scripted({"partmethod": [(0,)]})
    assert store.tables_outside_of_citus() == []
