"""Tables that lack a part, although ``migrate`` has created them."""

from unittest.mock import patch

import pytest
from django.db import connection

from idempotency.models import IdempotencyRecord, IdempotencyStep


@pytest.fixture
def whole_tables(transactional_db):
    """Create the tables again at the end."""
    yield
    with connection.schema_editor() as editor:
        for model in (IdempotencyRecord, IdempotencyStep):
            if model._meta.db_table in connection.introspection.table_names():
                editor.delete_model(model)
            editor.create_model(model)


def drop(editor, model):
    editor.delete_model(model)


def drop_field(editor, model, name):
    editor.remove_field(model, model._meta.get_field(name))


def create_without_constraints(editor, model):
    editor.delete_model(model)
    with patch.object(model._meta, "constraints", []):
        editor.create_model(model)
