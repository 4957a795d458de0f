"""Migrations after the first only add, so that the earlier release works on the later release's tables."""

import pytest
from django.apps import apps
from django.core.management import call_command
from django.db import migrations, models
from django.db.migrations.loader import MigrationLoader
from django.db.models.functions import Now

#: The apps with tables, and the app whose model the rules are tested on.
APPS = {"idempotency", "idempotency_dashboard", "idempotency_outbox"}
APP = "idempotency_outbox"
FIRST = "0001_initial"

#: Operations that don't affect the earlier release.
HARMLESS = (
    migrations.AddIndex,
    migrations.AlterModelManagers,
    migrations.AlterModelOptions,
    migrations.CreateModel,
)


#: Django doesn't know what these change, so ``makemigrations`` can't detect that models and tables differ.
UNSEEN = (migrations.RunPython, migrations.RunSQL, migrations.SeparateDatabaseAndState)


def not_additive(operation, before, app=APP):
    """Return why the earlier release may fail after the operation, or None if it can't."""
    if isinstance(operation, HARMLESS):
        return None
    if isinstance(operation, migrations.AddField):
        field = operation.field
        if field.null or field.has_db_default():
            return None
        return "its inserts leave the new column out: give it null=True or db_default="
    if isinstance(operation, migrations.AlterField):
        old, new = before.models[app, operation.model_name_lower].fields[operation.name], operation.field
        known = [{**field.deconstruct()[3], **dict.fromkeys(field.non_db_attrs)} for field in (old, new)]
        same = type(old) is type(new) and known[0] == known[1]
        return None if same else "it reads and writes the old column"
    return "only additions are allowed; remove what is unused one release after the code that used it"


@pytest.mark.once
@pytest.mark.django_db
def test_the_tables_match_the_models():
    call_command("makemigrations", check_changes=True, dry_run=True, verbosity=0)
    disk_migrations = MigrationLoader(None).disk_migrations
    unseen = [
        (key, operation.describe())
        for key, migration in disk_migrations.items()
        for operation in migration.operations
        if key[0] in APPS and isinstance(operation, UNSEEN)
    ]
    assert not unseen


def test_each_app_has_its_tables_and_no_other():
    tables = {app: {model._meta.db_table for model in apps.get_app_config(app).get_models()} for app in APPS}
    assert tables == {
        "idempotency": {"idempotency_record", "idempotency_step"},
        "idempotency_dashboard": {"idempotency_dashboard_counter"},
        "idempotency_outbox": {"idempotency_outbox_message"},
    }


def test_migrations_after_the_first_only_add():
    loader = MigrationLoader(None)
    for key in sorted(loader.disk_migrations):
        if key[0] not in APPS or key[1] == FIRST:
            continue
        state = loader.project_state(key, at_end=False)
        for operation in loader.disk_migrations[key].operations:
            why = not_additive(operation, state, key[0])
            assert why is None, (
                f"Migration {key[1]}: {operation.describe()!r} is not additive. While a deploy is under way, and "
                f"after a rollback, the earlier release runs on these tables: {why}."
            )
            operation.state_forwards(key[0], state)


TEXT = models.CharField(max_length=16)

ALLOWED = [
    migrations.AddField("outboxmessage", "note", models.TextField(null=True)),
    migrations.AddField("outboxmessage", "made_at", models.DateTimeField(db_default=Now())),
    migrations.AlterField("outboxmessage", "status", models.CharField("state", max_length=8, default="pending")),
    migrations.AddIndex("outboxmessage", models.Index(fields=["topic"], name="topic")),
    migrations.CreateModel("Note", [("id", models.BigAutoField(primary_key=True))]),
    migrations.AlterModelOptions("outboxmessage", {"verbose_name": "message"}),
]
REFUSED = [
    migrations.AddField("outboxmessage", "note", models.TextField(default="")),
    migrations.AlterField("outboxmessage", "status", TEXT),
    migrations.AlterField("outboxmessage", "sender", models.TextField(default="")),
    migrations.RemoveField("outboxmessage", "error"),
    migrations.RenameField("outboxmessage", "error", "last_error"),
    migrations.DeleteModel("outboxmessage"),
    migrations.AlterModelTable("outboxmessage", "outbox"),
    migrations.RemoveIndex("outboxmessage", "idempotency_outbox_sent"),
    migrations.AddConstraint("outboxmessage", models.UniqueConstraint(fields=["topic"], name="topic")),
    migrations.RunSQL("SELECT 1"),
    migrations.RunPython(migrations.RunPython.noop),
]


@pytest.mark.parametrize("operation", [*ALLOWED, *REFUSED], ids=lambda operation: operation.describe())
def test_a_change_that_breaks_the_earlier_release_is_not_additive(operation):
    state = MigrationLoader(None).project_state((APP, FIRST))
    assert (not_additive(operation, state) is None) == (operation in ALLOWED)
