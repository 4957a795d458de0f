"""Declaring an operation: refusals, and how settings and policy combine."""

import inspect
from datetime import timedelta
from typing import Union, get_args, get_origin, get_type_hints

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.test import override_settings

from idempotency import ACCEPTED, CONFLICT, PARK, REEXECUTE, Operation, Wait, claim, idempotent
from idempotency.conf import Settings, settings
from idempotency.operation import operation_for, registry
from idempotency.options.table import (
    OPTIONS,
    SETTINGS,
    BlockArguments,
    Options,
    RequestArguments,
    TaskArguments,
    Use,
)


def test_an_operation_reads_the_settings_when_its_policy_is_used():
    operation = Operation.declare("tests.settings")
    defaults = (timedelta(days=3), timedelta(seconds=60), CONFLICT)
    assert (operation.policy.retention, operation.policy.lease, operation.policy.in_progress) == defaults
    entries = {
        "RETENTION": timedelta(days=9),
        "LEASE": timedelta(seconds=5),
        "IN_PROGRESS": ACCEPTED,
        "KEY_REQUIRED": False,
        "METHODS": ["PUT"],
        "ACCOUNT": f"{__name__}.an_account",
        "RECORDABLE": f"{__name__}.only_created",
        "RECORDED_HEADERS": ["X-Trace"],
        "MAX_RESPONSE_BODY": 10,
    }
    functions = {**entries, "ACCOUNT": an_account, "RECORDABLE": only_created}
    for given in (entries, functions):
        with override_settings(IDEMPOTENCY=given):
            for setting, value in functions.items():
                assert getattr(operation.policy, SETTINGS[setting].name) == value
    assert operation.policy.in_progress is CONFLICT


def an_account(request):
    return "everyone"


def only_created(status):
    return status == 201


@pytest.mark.failure_10
def test_a_declared_option_overrides_the_settings_even_if_false():
    declared = {
        "key_required": False,
        "retention": timedelta(hours=1),
        "in_progress": ACCEPTED,
        "recordable": only_created,
    }
    operation = Operation.declare("tests.declared", account=f"{__name__}.an_account", **declared)
    with override_settings(IDEMPOTENCY={"KEY_REQUIRED": True, "RETENTION": timedelta(days=9), "IN_PROGRESS": CONFLICT}):
        for name, value in {**declared, "account": an_account}.items():
            assert getattr(operation.policy, name) == value


@pytest.mark.parametrize(
    ("policy", "error"),
    [
        # An option and its setting share a validator, so ``test_checks`` has more wrong values.
        ({"retention": timedelta(0)}, "retention must be a positive timedelta"),
        ({"lease": 60}, "lease must be a positive timedelta"),
        ({"retention": timedelta.max}, "retention must be a positive timedelta of up to 36500 days"),
        ({"retention": timedelta(seconds=9), "lease": timedelta(seconds=9)}, "lease .* must be shorter than retention"),
        (
            {"retention": timedelta(hours=1), "heartbeat": timedelta(hours=2)},
            "heartbeat .* must not be longer than retention",
        ),
        ({"heartbeat": timedelta(0)}, "heartbeat must be a positive timedelta"),
        ({"transaction": 0}, "transaction must be True or False"),
        ({"recovery": "park"}, "recovery must be REEXECUTE, PARK or Reconcile"),
        ({"in_progress": 409}, "in_progress must be CONFLICT, ACCEPTED, Wait.* or Attach"),
        ({"recorded_headers": [b"Location"]}, "recorded_headers must be a collection of names"),
        (
            {"retention": timedelta(hours=1), "body_retention": timedelta(hours=1)},
            "body_retention .* must be shorter than retention",
        ),
        ({"max_response_body": True}, "max_response_body must be a positive number of bytes"),
        ({"account": 7}, "account must be a callable or a dotted path"),
        ({"payload": 7}, "payload must be a callable"),
        ({"rebuild": "a.path"}, "rebuild must be a callable"),
        ({"redact": b""}, "redact must be a callable"),
        ({"transaction": False}, "recovery="),  # the recovery from a crash must be declared
        *(({"name": name}, "An operation's name") for name in ("", "x" * 256, "a\x00b", "a\nb", None, 7)),
    ],
)
def test_a_wrong_policy_or_name_is_refused_at_its_declaration(policy, error):
    with pytest.raises(ImproperlyConfigured, match=error):
        Operation.declare(**{"name": "tests.wrong", **policy})
    assert registry.get("tests.wrong") is None
    assert Operation.declare("tests.inside").recovery is REEXECUTE  # the default within a transaction


@pytest.mark.parametrize("seconds", [0, -1, 31, "5", True, float("nan")])
def test_a_wait_is_bounded(seconds):
    with pytest.raises(ImproperlyConfigured, match="Wait"):
        Wait(seconds)
    assert Wait(0.5).seconds == 0.5


def test_one_name_cannot_have_two_policies():
    first = Operation.declare("tests.twice", lease=timedelta(seconds=5))
    Operation.declare("tests.twice", lease=timedelta(seconds=5))  # the same declaration, as in a reloaded module
    with pytest.raises(ImproperlyConfigured, match="already declared"):
        Operation.declare("tests.twice", lease=timedelta(seconds=6))
    assert first.policy.retention == timedelta(days=3)
    with override_settings(IDEMPOTENCY={"RETENTION": timedelta(days=9)}):
        assert first.policy.retention == timedelta(days=9)
    assert repr(first) == "<Operation 'tests.twice'>"


def test_a_bare_name_means_the_operation_declared_under_it():
    declared = Operation.declare("tests.elsewhere", lease=timedelta(seconds=5))
    assert operation_for("tests.elsewhere", {}) is declared
    assert operation_for(declared, {}) is declared
    assert operation_for("tests.new", {}).policy.lease == timedelta(seconds=60)
    with pytest.raises(ImproperlyConfigured, match="has its own policy"):
        operation_for(declared, {"key_required": False})
    # Declarations repeated at each call are one operation.
    assert operation_for("tests.elsewhere", {"lease": timedelta(seconds=5)}) is declared
    with pytest.raises(ImproperlyConfigured, match="already declared"):
        operation_for("tests.elsewhere", {"lease": timedelta(seconds=6)})


@pytest.mark.parametrize("use", Use)
def test_a_constructor_declares_nothing_but_a_use_does(use):
    made, other = Operation("tests.undeclared"), Operation("tests.undeclared", lease=timedelta(seconds=9))
    assert registry.get("tests.undeclared") is None
    assert operation_for(made, {}, use) is made is registry.get("tests.undeclared")
    with pytest.raises(ImproperlyConfigured, match="already declared"):
        operation_for(other, {}, use)
    with override_settings(IDEMPOTENCY={"LEASE": timedelta(seconds=5)}):
        assert made.policy.lease == timedelta(seconds=5)
    assert made.policy.lease == timedelta(seconds=60)


@pytest.mark.parametrize("use", Use)
def test_an_operation_that_only_a_sweep_settles_is_declared_before_its_use(use):
    """Otherwise the first process that imports no view knows nothing of it."""
    made = Operation("tests.undeclared", transaction=False, recovery=PARK)
    with pytest.raises(ImproperlyConfigured, match=r"no sweep.*Operation\.declare\('tests\.undeclared'"):
        operation_for(made, {}, use)
    assert registry.get("tests.undeclared") is None
    declared = Operation.declare("tests.undeclared", transaction=False, recovery=PARK)
    assert operation_for(declared, {}, use) is declared


# Other lists of the options are compared with their one declaration


def members(hint):
    """The parts of a union, without None and without str, the dotted path of a function."""
    parts = get_args(hint) if get_origin(hint) in {Union, type(int | str)} else (hint,)
    return set(parts) - {type(None), str}


ARGUMENTS = {Use.REQUEST: RequestArguments, Use.BLOCK: BlockArguments, Use.TASK: TaskArguments}


@pytest.mark.parametrize("use", Use)
def test_each_argument_has_the_type_of_its_option(use):
    arguments, options = get_type_hints(ARGUMENTS[use]), get_type_hints(Options)
    assert set(options) == set(OPTIONS)
    assert set(arguments) == {name for name, option in OPTIONS.items() if use in option.applies_to}
    for name, hint in options.items():
        if name not in arguments:
            continue
        expected = members(arguments[name])
        assert members(hint) == {part for part in expected if getattr(part, "__name__", "") != "Reconcile"}, name


def test_the_settings_have_an_attribute_and_a_hint_for_each_entry():
    of_the_project = {option.name for option in SETTINGS.values()} - set(OPTIONS)
    assert set(get_type_hints(Settings)) == of_the_project | {"defaults", "fingerprint_secrets"}
    assert [name for name, option in SETTINGS.items() if option.setting != name] == []
    assert all(option.hint for option in SETTINGS.values())


def test_each_default_is_valid():
    for option in (*OPTIONS.values(), *SETTINGS.values()):
        assert option.default is None or option.problem_of(option.default) is None, option.name
        assert option.problem_of_path(option.default) is None, option.name
    with override_settings(IDEMPOTENCY={"ERROR_RESPONSE": None, "FINGERPRINT_KEYS": None}):
        assert settings().error_response is None


@pytest.mark.parametrize(
    ("takes_options", "arguments"),
    [(Operation.__init__, "RequestArguments"), (idempotent, "RequestArguments"), (claim, "BlockArguments")],
)
def test_options_are_typed_keywords(takes_options, arguments):
    parameter = list(inspect.signature(takes_options).parameters.values())[-1]
    assert parameter.kind is inspect.Parameter.VAR_KEYWORD
    assert parameter.annotation == f"Unpack[{arguments}]"


def test_an_unknown_argument_is_reported_with_the_likely_one():
    with pytest.raises(TypeError, match=r"'leese'. Did you mean 'lease'"):
        Operation.declare("tests.unknown", leese=timedelta(seconds=1))
    with pytest.raises(TypeError, match=r"'qqqq'. It takes retention, lease"):
        Operation.declare("tests.unknown", qqqq=1)


def test_a_policy_is_read_once_until_the_settings_change():
    operation = Operation.declare("tests.kept")
    with override_settings(IDEMPOTENCY={"RETENTION": timedelta(days=9)}):
        policy = operation.policy
        assert policy.retention == timedelta(days=9)
        with override_settings(USE_TZ=True):  # another setting
            assert operation.policy is policy
    assert operation.policy.retention == timedelta(days=3)


# An option that has no effect where it is given is refused

WITHOUT_EFFECT = [
    (use, name) for use in (Use.BLOCK, Use.TASK) for name, option in OPTIONS.items() if use not in option.applies_to
]
SAMPLES = {
    "max_key_age": timedelta(hours=1),
    "key_required": True,
    "methods": ["POST"],
    "account": str,
    "recordable": bool,
    "recorded_headers": ["ETag"],
    "payload": str,
    "payload_headers": ["Depth"],
    "rebuild": str,
    "key": str,
    "profile": "stripe",
}


@pytest.mark.parametrize(("use", "name"), WITHOUT_EFFECT)
def test_an_option_without_effect_is_refused(use, name):
    argument = {name: SAMPLES[name]}
    for declaration in ("tests.idle", Operation.declare("tests.shared", **argument), "tests.shared"):
        given = argument if declaration == "tests.idle" else {}
        with pytest.raises(ImproperlyConfigured, match=f"{name}= has no effect on a (claim|task)"):
            operation_for(declaration, given, use)
    assert registry.get("tests.idle") is None


def test_a_block_and_a_task_can_only_refuse_a_duplicate_or_wait():
    for use in (Use.BLOCK, Use.TASK):
        assert operation_for("tests.waits", {"in_progress": Wait(1)}, use).policy.in_progress == Wait(1)
        with pytest.raises(ImproperlyConfigured, match="in_progress=ACCEPTED has no effect"):
            operation_for("tests.accepts", {"in_progress": ACCEPTED}, use)


def test_a_claim_block_refuses_the_options_of_requests():
    with (
        pytest.raises(
            ImproperlyConfigured, match=r"'tests.block': methods=, recorded_headers= has no effect on a claim\(\) block"
        ),
        claim("tests.block", account_id="1", key="k", methods=["PUT"], recorded_headers=["ETag"]),
    ):
        pass
