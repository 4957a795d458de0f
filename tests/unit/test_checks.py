"""Scenario 30: ``manage.py check`` reports a wrong setting with an id and a hint."""

import os
from datetime import timedelta
from types import ModuleType
from unittest.mock import Mock

import pytest
from django.core.checks import run_checks
from django.core.exceptions import ImproperlyConfigured
from django.core.management import call_command
from django.core.management.base import SystemCheckError
from django.db import OperationalError, connection, connections
from django.db.migrations.recorder import MigrationRecorder
from django.test import override_settings

from idempotency import PARK, Attach, Operation
from idempotency.checks import check_databases, check_settings
from idempotency.conf import settings
from idempotency.models import IdempotencyRecord, IdempotencyStep
from idempotency.options.table import SETTINGS
from idempotency.store import Replication, upkeep_for
from tests.aliases import another_alias
from tests.operations import forgetting_operations
from tests.records import HOUR, make_records
from tests.tables import create_without_constraints, drop, drop_field, whole_tables  # noqa: F401 - a fixture

pytestmark = pytest.mark.django_db  # Django's checks query a SQLite database's features

NOT_A_FUNCTION = 7


def messages():
    return {message.id: message for message in run_checks(tags=["idempotency"], databases=["default"])}


@pytest.mark.scenario_30
def test_the_defaults_and_the_sample_project_are_sound():
    assert messages() == {}


@pytest.mark.scenario_30
@pytest.mark.failure_10
@pytest.mark.parametrize(
    ("entries", "message_id", "text"),
    [
        ([], "idempotency.E001", "must be a dictionary"),
        ({"TLT": timedelta(days=1)}, "idempotency.E002", "no entry 'TLT'"),
        ({"RETENTION": 3}, "idempotency.E003", "'RETENTION'"),
        ({"RETENTION": None}, "idempotency.E003", "'RETENTION'"),
        ({"RETENTION": timedelta(0)}, "idempotency.E003", "'RETENTION'"),
        ({"LEASE": timedelta(seconds=-5)}, "idempotency.E003", "'LEASE'"),
        ({"IN_PROGRESS": "CONFLICT"}, "idempotency.E003", "'IN_PROGRESS'"),
        ({"IN_PROGRESS": Attach(str)}, "idempotency.E003", "belongs to one operation and its job: declare it there."),
        ({"KEY_REQUIRED": None}, "idempotency.E003", "'KEY_REQUIRED'"),
        ({"METHODS": "POST"}, "idempotency.E003", "'METHODS'"),
        ({"METHODS": []}, "idempotency.E003", "at least one"),
        ({"METHODS": ["PUT", "post"]}, "idempotency.E003", "which names 'post': write 'POST'"),
        ({"ACCOUNT": "no.such.thing"}, "idempotency.E003", "can't be imported (No module named 'no')."),
        ({"ACCOUNT": "."}, "idempotency.E003", "can't be imported ('.' is not a dotted path)."),
        ({"ACCOUNT": "..thing"}, "idempotency.E003", "can't be imported ('..thing' is not a dotted path)."),
        ({"ACCOUNT": "tests.unit.test_checks.NOT_A_FUNCTION"}, "idempotency.E003", "must name a callable"),
        ({"RECORDABLE": 201}, "idempotency.E003", "'RECORDABLE'"),
        ({"RECORDED_HEADERS": "Location"}, "idempotency.E003", "'RECORDED_HEADERS'"),
        ({"RECORDED_HEADERS": ["ETag", "Set-Cookie"]}, "idempotency.E003", "which names 'Set-Cookie', which must not"),
        ({"MAX_RESPONSE_BODY": -1}, "idempotency.E003", "'MAX_RESPONSE_BODY'"),
        ({"ERROR_RESPONSE": "nope"}, "idempotency.E003", "'ERROR_RESPONSE'"),
        ({"RENEWAL_DATABASES": ["default"]}, "idempotency.E003", "must be a dict of aliases"),
        ({"RENEWAL_DATABASES": {"default": None}}, "idempotency.E003", "must be a dict of aliases"),
        ({"RENEWAL_DATABASES": {"default": "none"}}, "idempotency.E003", "names 'none', which DATABASES does not have"),
        ({"MAX_RETRY_AFTER": 30}, "idempotency.E003", "'MAX_RETRY_AFTER'"),
        ({"KEY": "nope"}, "idempotency.E003", "'KEY'"),
        ({"MAX_KEY_AGE": 3}, "idempotency.E003", "'MAX_KEY_AGE'"),
        ({"BODY_RETENTION": timedelta(0)}, "idempotency.E003", "'BODY_RETENTION'"),
        ({"LEASE": timedelta(days=3)}, "idempotency.E014", "LEASE (3 days, 0:00:00) must be shorter than"),
        ({"MAX_KEY_AGE": timedelta(days=3)}, "idempotency.E014", "MAX_KEY_AGE (3 days, 0:00:00) must be shorter than"),
        (
            {"BODY_RETENTION": timedelta(days=3)},
            "idempotency.E014",
            "BODY_RETENTION (3 days, 0:00:00) must be shorter than",
        ),
        ({"RETENTION": timedelta(seconds=60)}, "idempotency.E014", "LEASE (0:01:00) must be shorter than"),
    ],
)
def test_a_wrong_setting_fails_the_check_and_its_first_use(entries, message_id, text):
    operation = Operation.declare("tests.wrong")
    with override_settings(IDEMPOTENCY=entries):
        (message,) = check_settings(None)  # one message for all operations
        assert messages() == {message_id: message}
        assert text in message.msg
        assert message.hint
        for use in (lambda: operation.policy, settings, lambda: operation.policy):
            with pytest.raises(ImproperlyConfigured, match=message_id) as raised:
                use()
            assert text in str(raised.value)


@pytest.mark.scenario_30
def test_the_check_command_fails_on_a_wrong_setting():
    with override_settings(IDEMPOTENCY=[]), pytest.raises(SystemCheckError, match=r"idempotency\.E001"):
        call_command("check")


@pytest.mark.scenario_30
@pytest.mark.parametrize("name", ["MAXBODY", "max_response_body", "QQQQ"])
def test_an_unknown_name_gets_a_hint_with_the_likely_one(name):
    with override_settings(IDEMPOTENCY={name: 1}):
        hint = messages()["idempotency.E002"].hint
    assert all(name in hint for name in SETTINGS) if name == "QQQQ" else hint == "Did you mean 'MAX_RESPONSE_BODY'?"


def test_a_nonexistent_switch_gets_a_hint_with_its_page():
    for name in ("ENABLED", "DISABLE"):
        with override_settings(IDEMPOTENCY={name: False}):
            assert "how-to/introduce" in messages()["idempotency.E002"].hint


@pytest.mark.failure_70
@pytest.mark.parametrize("value", ["hunter2", [], ["hunter2", ""], [7, "hunter2"], ["hunter2\ud800"], {"hunter2"}])
def test_an_invalid_secret_is_not_shown(value):
    with (
        override_settings(IDEMPOTENCY={"FINGERPRINT_KEYS": value}),
        pytest.raises(ImproperlyConfigured, match=r"FINGERPRINT_KEYS.*E003") as refused,
    ):
        settings()
    assert "hunter2" not in str(refused.value)


@pytest.mark.failure_11
@pytest.mark.parametrize(
    ("policy", "entries", "message_id"),
    [
        # A lease as long as the retention would let a crash block a key for all of it.
        ({"lease": timedelta(days=1)}, {"RETENTION": timedelta(days=1)}, "idempotency.E014"),
        ({"retention": timedelta(seconds=60)}, {}, "idempotency.E014"),
        ({"heartbeat": timedelta(hours=2)}, {"RETENTION": timedelta(hours=1)}, "idempotency.E014"),
        ({"account": "no.such.thing"}, {}, "idempotency.E018"),
        ({"recordable": "tests.unit.test_checks.NOT_A_FUNCTION"}, {}, "idempotency.E018"),
    ],
)
def test_an_operation_made_wrong_by_settings_fails_the_check_and_its_use(policy, entries, message_id):
    operation = Operation.declare("tests.wrong", **policy)
    if entries:
        assert messages() == {}
    with override_settings(IDEMPOTENCY=entries):
        found = messages()[message_id]
        assert "tests.wrong" in found.msg
        assert found.hint
        with pytest.raises(ImproperlyConfigured, match=f"tests.wrong.*{message_id}"):
            _ = operation.policy


def test_a_database_without_autocommit_is_refused(monkeypatch):
    monkeypatch.setitem(connection.settings_dict, "AUTOCOMMIT", False)
    assert "AUTOCOMMIT" in messages()["idempotency.E016"].msg


def test_psycopg2_is_refused(monkeypatch):
    monkeypatch.setattr(connection, "Database", ModuleType("psycopg2"))
    (found,) = check_databases(None)
    assert (found.id, "pip install 'psycopg" in (found.hint or "")) == ("idempotency.E020", True)


class ElsewhereRouter:
    def db_for_write(self, model, **hints):
        return "records" if model._meta.app_label == "idempotency" else None


@pytest.mark.failure_27
def test_records_outside_the_default_database_are_reported(monkeypatch):
    monkeypatch.setitem(connections.settings, "records", connection.settings_dict)
    Operation.declare("tests.elsewhere")
    with override_settings(DATABASE_ROUTERS=[ElsewhereRouter()]):
        found = messages()
    assert "'records'" in found["idempotency.W001"].msg
    del connections["records"]


@pytest.fixture
def renewals(transactional_db, monkeypatch):
    """Renew the default database's leases over an alias. Yields the alias's settings."""
    with (
        another_alias(monkeypatch, "renewals", os.environ["DATABASE_URL"]),
        override_settings(IDEMPOTENCY={"RENEWAL_DATABASES": {"default": "renewals"}}),
    ):
        yield connections.settings["renewals"]


def test_an_alias_for_renewals_must_be_the_same_database(renewals, tmp_path):
    assert messages() == {}
    connections["renewals"].close()
    del connections["renewals"]
    renewals["NAME"] = str(tmp_path / "another.sqlite3") if connection.vendor == "sqlite" else "another"
    assert "can't be reached or is another database" in messages()["idempotency.E030"].msg
    assert {message.id for message in check_databases(None)} == set()  # without databases=, it must not connect


def test_an_alias_for_renewals_is_checked_like_the_records_alias(renewals):
    renewals["AUTOCOMMIT"] = False
    assert "'renewals' has AUTOCOMMIT off" in messages()["idempotency.E016"].msg


@pytest.mark.parametrize(
    ("pooled", "known", "warned"), [(True, False, True), (True, True, False), (False, False, False)]
)
def test_heartbeats_behind_a_pooler_are_reported(monkeypatch, pooled, known, warned):
    monkeypatch.setattr(type(upkeep_for("default")), "is_pooled", lambda upkeep: pooled)
    renewals = {"default": "default"} if known else {}
    with forgetting_operations(), override_settings(IDEMPOTENCY={"RENEWAL_DATABASES": renewals}):
        Operation.declare("a.beating", heartbeat=timedelta(minutes=5))  # listed first in the shortened message
        assert ["a.beating" in message.msg for message in messages().values()] == ([True] if warned else [])


@pytest.mark.failure_21
@pytest.mark.sqlite
def test_sqlite_with_deferred_transactions_is_reported(monkeypatch):
    monkeypatch.delitem(connection.settings_dict["OPTIONS"], "transaction_mode")
    assert "IMMEDIATE" in messages()["idempotency.W002"].hint


@pytest.mark.parametrize(
    ("vendor", "mariadb", "version", "tested"),
    [
        ("oracle", False, (), False),
        ("mysql", False, (8, 4, 0), False),
        ("mysql", True, (10, 6, 20), False),
        ("mysql", True, (10, 11, 0), True),
    ],
)
def test_an_untested_database_is_reported(vendor, mariadb, version, tested, monkeypatch):
    monkeypatch.setattr(connections["default"], "vendor", vendor)
    for name, value in {"mysql_is_mariadb": mariadb, "mysql_version": version}.items():
        monkeypatch.setitem(vars(connections["default"]), name, value)
    assert ["idempotency.W003" in str(message) for message in check_databases(None)] == ([] if tested else [True])


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (None, set()),  # the database has no such information
        (Replication("on", is_synchronous=False, asynchronous_standbys=0), set()),
        (Replication("on", is_synchronous=False, asynchronous_standbys=1), {"W015"}),
        (Replication("on", is_synchronous=True, asynchronous_standbys=1), set()),  # an additional standby, for reports
        (Replication("local", is_synchronous=False, asynchronous_standbys=0), set()),
        (Replication("local", is_synchronous=True, asynchronous_standbys=0), {"W013"}),
        (Replication("local", is_synchronous=False, asynchronous_standbys=2), {"W015", "W013"}),
        (Replication("off", is_synchronous=False, asynchronous_standbys=0), {"W013"}),
        (OperationalError("the server is down"), set()),
    ],
)
def test_a_server_that_may_lose_claims_is_reported_for_outside_effects(monkeypatch, found, expected):
    monkeypatch.setattr(type(upkeep_for("default")), "replication", Mock(side_effect=[found] * 3))
    outside = [Operation.declare(f"tests.{name}", transaction=False, recovery=PARK) for name in "abcd"]
    monkeypatch.setattr("idempotency.checks.declared_operations", lambda: outside)
    shown = messages()
    assert {message_id.removeprefix("idempotency.") for message_id in shown} == expected
    assert all("tests.a, tests.b, tests.c, …" in message.msg for message in shown.values())
    assert check_databases(None) == []  # which may not connect

    inside = [Operation.declare("tests.inside")]
    monkeypatch.setattr("idempotency.checks.declared_operations", lambda: inside)
    assert messages() == {}


@pytest.mark.failure_112
def test_records_of_an_operation_that_no_code_declares_are_reported():
    make_records(2, operation="charges.renamed", expires=-HOUR)
    make_records(3, operation="tests.declared", expires=HOUR)
    with forgetting_operations():
        Operation.declare("tests.declared")
        assert messages() == {}
        make_records(1, operation="charges.renamed", expires=HOUR)
        make_records(2, operation="charges.moved", expires=HOUR)
        found = [message.msg for message in check_databases(None, databases=["default"])]
        listed = "of operations that no code declares: 'charges.moved' (2), 'charges.renamed' (1). If"
        assert [listed in text for text in found] == [True]
        assert check_databases(None) == []  # which may not connect
        for number in range(20):
            make_records(1, operation=f"charges.{number}", expires=HOUR)
        found = messages()["idempotency.W027"].msg
        assert found.count("'charges.") == 20
        assert ", …. If" in found


@pytest.mark.usefixtures("whole_tables")
@pytest.mark.parametrize(
    ("missing", "break_table", "arguments"),
    [
        ("the table idempotency_step", drop, [IdempotencyStep]),
        ("the column idempotency_record.error", drop_field, [IdempotencyRecord, "error"]),
        (
            "the constraint idempotency_record_scope of idempotency_record",
            create_without_constraints,
            [IdempotencyRecord],
        ),
    ],
)
def test_tables_that_lack_a_part_although_migrate_ran_are_reported(missing, break_table, arguments):
    with connection.schema_editor() as editor:
        break_table(editor, *arguments)
    assert f"lacks {missing}, although the migrations are applied" in messages()["idempotency.E032"].msg
    assert check_databases(None) == []  # which may not connect


@pytest.mark.usefixtures("whole_tables")
def test_tables_before_their_migration_are_not_reported():
    """Otherwise ``migrate``, which runs the checks, could not create them."""
    with connection.schema_editor() as editor:
        drop(editor, IdempotencyStep)
    migrations = MigrationRecorder(connection)
    migrations.record_unapplied("idempotency", "0001_initial")
    try:
        assert messages() == {}
    finally:
        migrations.record_applied("idempotency", "0001_initial")


def test_a_table_unknown_to_the_cluster_is_reported(monkeypatch):
    monkeypatch.setattr(type(upkeep_for("default")), "tables_outside_of_citus", lambda upkeep: ["shop_order"])
    assert "shop_order" in messages()["idempotency.W014"].msg
    assert check_databases(None) == []  # which may not connect
