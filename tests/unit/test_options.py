"""The options of an operation are declared once. What else names them is held against that declaration."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, Union, get_args, get_origin, get_type_hints

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.test import override_settings

from idempotency import Attach, Operation, claim, idempotent
from idempotency.conf import Defaults, Settings, settings
from idempotency.options.table import OPTIONS, SETTINGS, OperationPolicy
from tests.operations import forgetting_operations


@pytest.fixture(autouse=True)
def _own_registry() -> Iterator[None]:
    with forgetting_operations():
        yield


def members(hint: Any) -> set[Any]:
    """The parts of a union, without None and without the dotted path that stands for a function."""
    parts = get_args(hint) if get_origin(hint) in {Union, type(int | str)} else (hint,)
    return set(parts) - {type(None), str}


def test_each_attribute_of_an_operation_has_the_type_of_its_argument() -> None:
    attributes = {name: hint for name, hint in get_type_hints(Operation).items() if name not in {"name", "declared"}}
    arguments = get_type_hints(OperationPolicy)
    assert set(attributes) == set(arguments) == set(OPTIONS)
    for name, hint in attributes.items():
        expected = members(arguments[name])
        assert members(hint) == {part for part in expected if getattr(part, "__name__", "") != "Reconcile"}, name


def test_the_settings_have_an_attribute_for_each_entry() -> None:
    assert set(get_type_hints(Settings)) == {option.name for option in SETTINGS.values()}
    assert set(get_type_hints(Defaults)) == {option.name for option in OPTIONS.values() if option.setting}
    assert [name for name, option in SETTINGS.items() if option.setting != name] == []


def test_each_entry_has_a_check_and_a_hint_of_its_own() -> None:
    assert len({option.check_id for option in SETTINGS.values()}) == len(SETTINGS)
    assert all(re.fullmatch(r"idempotency\.E\d{3}", option.check_id) and option.hint for option in SETTINGS.values())


def test_each_default_is_valid() -> None:
    for option in (*OPTIONS.values(), *SETTINGS.values()):
        assert option.default is None or option.problem_of(option.default) is None, option.name
        assert option.problem_of_path(option.default) is None, option.name


@pytest.mark.failure_mode(70)
@pytest.mark.parametrize("value", ["hunter2", [], ["hunter2", ""], [7, "hunter2"], {"hunter2"}])
def test_a_secret_is_not_shown_when_it_is_wrong(value: Any) -> None:
    with (
        override_settings(IDEMPOTENCY={"FINGERPRINT_KEYS": value}),
        pytest.raises(ImproperlyConfigured, match=r"FINGERPRINT_KEYS.*E019") as refused,
    ):
        _ = settings.ttl
    assert "hunter2" not in str(refused.value)


def test_none_may_be_given_where_it_is_the_default() -> None:
    with override_settings(IDEMPOTENCY={"ERROR_RESPONSE": None, "FINGERPRINT_KEYS": None}):
        assert settings.error_response is None
    with override_settings(IDEMPOTENCY={"TTL": None}), pytest.raises(ImproperlyConfigured, match="E003"):
        _ = settings.ttl


def test_the_docstring_explains_every_argument() -> None:
    explained = re.findall(r":param (\w+):", inspect.getdoc(Operation) or "")
    assert sorted(explained) == sorted(["name", *OPTIONS])


@pytest.mark.parametrize("takes_policy", [Operation.__init__, idempotent, claim])
def test_policies_are_typed_keywords(takes_policy: Callable[..., Any]) -> None:
    parameter = inspect.signature(takes_policy).parameters["policy"]
    assert parameter.kind is inspect.Parameter.VAR_KEYWORD
    assert parameter.annotation == "Unpack[OperationPolicy]"


def test_an_argument_that_does_not_exist_is_answered_with_the_one_that_was_meant() -> None:
    with pytest.raises(TypeError, match=r"'leese'. Did you mean 'lease'"):
        Operation("unit.unknown", leese=timedelta(seconds=1))  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"'qqqq'. It takes ttl, lease"):
        Operation("unit.unknown", qqqq=1)  # type: ignore[call-arg]


def test_an_attribute_that_does_not_exist_is_an_attribute_error() -> None:
    operation = Operation("unit.attributes")
    for holder in (operation, settings):
        with pytest.raises(AttributeError, match="no attribute 'leese'"):
            _ = holder.leese  # type: ignore[attr-defined]


def test_a_policy_is_read_once_until_the_settings_change() -> None:
    operation = Operation("unit.kept")
    with override_settings(IDEMPOTENCY={"TTL": timedelta(days=9)}):
        assert operation.ttl == timedelta(days=9)
        assert {"ttl", "lease", "methods"} <= vars(operation).keys()
        with override_settings(USE_TZ=True):  # another setting
            assert "ttl" in vars(operation)
    assert "ttl" not in vars(operation)
    assert operation.ttl == timedelta(days=3)


def test_an_operation_that_was_declared_again_follows_the_settings_too() -> None:
    first = Operation("unit.again")
    Operation("unit.again")
    assert first.ttl == timedelta(days=3)
    with override_settings(IDEMPOTENCY={"TTL": timedelta(days=9)}):
        assert first.ttl == timedelta(days=9)


WRONG = [
    ({"TTL": timedelta(0)}, "'TTL'"),
    ({"METHODS": ["post"]}, "in capitals"),
    ({"MAX_BODY": 0}, "'MAX_BODY'"),
    ({"TLT": timedelta(days=1)}, "Did you mean 'TTL'"),
    (
        {"RECORDABLE": "no.such.thing"},
        r"'RECORDABLE'\] is 'no.such.thing', which can't be imported \(No module named 'no'\)\.",
    ),
    ({"IN_PROGRESS": Attach(str)}, r"is Attach\(.*\), which belongs to one operation and its job: declare it there\."),
    ({"LEASE": timedelta(days=3)}, "shorter than"),
    ([], "must be a dictionary"),
]


@pytest.mark.parametrize(("entries", "said"), WRONG)
def test_a_wrong_setting_is_refused_at_the_first_use_of_any(entries: Any, said: str) -> None:
    operation = Operation("unit.wrong_setting")
    with override_settings(IDEMPOTENCY=entries):
        for _ in range(2):
            with pytest.raises(ImproperlyConfigured, match=said):
                _ = operation.required
            with pytest.raises(ImproperlyConfigured, match=said):
                _ = settings.max_retry_after


def test_a_setting_that_contradicts_a_declaration_is_refused_at_the_first_use() -> None:
    long = Operation("unit.long", lease=timedelta(hours=2))
    alive = Operation("unit.alive", heartbeat=timedelta(hours=2))
    missing = Operation("unit.missing", account="no.such.thing")
    with override_settings(IDEMPOTENCY={"TTL": timedelta(hours=1)}):
        with pytest.raises(ImproperlyConfigured, match=r"unit.long.*E015"):
            _ = long.methods
        with pytest.raises(ImproperlyConfigured, match=r"unit.alive.*E017"):
            _ = alive.methods
    with pytest.raises(ImproperlyConfigured, match=r"unit.missing.*can't be imported.*E018"):
        _ = missing.methods


def test_a_function_may_be_named_by_its_path() -> None:
    assert Operation("unit.path", account=f"{__name__}.members").account is members
