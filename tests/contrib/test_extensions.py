"""The extensions that optional apps register."""

from dataclasses import fields

import pytest

from idempotency import extensions
from idempotency.extensions import Extension, register


@pytest.fixture
def _nothing_registered(monkeypatch):
    monkeypatch.setattr(extensions, "_extensions", {})


def added(extension):
    return {field.name for field in fields(Extension) if getattr(extension, field.name)}


def test_each_app_has_registered_its_extension():
    registered = {app: added(extension) for app, extension in extensions._extensions.items()}
    assert registered == {
        "idempotency.outbox": {"purges", "find_messages", "record_events"},
        "idempotency.contrib.celery": {"import_operations"},
        "idempotency.contrib.dashboard": {"event_counts"},
    }


@pytest.mark.usefixtures("_nothing_registered")
def test_an_app_that_registers_again_replaces_its_extension():
    register("shop", Extension(purges=["first"]))
    register("other", Extension())
    register("shop", Extension(purges=["second"]))
    assert [each.purges for each in extensions.extensions()] == [["second"], ()]


@pytest.mark.usefixtures("_nothing_registered")
def test_an_unknown_argument_is_refused():
    with pytest.raises(TypeError, match="purge"):
        register("shop", Extension(purge=[]))
    assert list(extensions.extensions()) == []
