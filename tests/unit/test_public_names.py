"""The public names of ``idempotency``."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import idempotency
from idempotency.protocol import faults


def in_a_new_process(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


def test_the_public_names_are_listed_before_their_first_use():
    listed = in_a_new_process("import idempotency; print(*dir(idempotency))").stdout.split()
    assert {*idempotency.__all__, "__version__"} <= {*listed}


def test_a_missing_entry_in_installed_apps_is_named():
    code = "from django.conf import settings as s; s.configure(); import django; django.setup(); import idempotency"
    ended = in_a_new_process(f"{code}; idempotency.idempotent")
    assert ended.returncode == 1
    assert "ImproperlyConfigured: 'idempotency' is used, but it is not in INSTALLED_APPS. Add it" in ended.stderr


def test_the_public_names_are_complete():
    for name in idempotency.__all__:
        assert getattr(idempotency, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = idempotency.nonsense


def test_every_module_logs_under_a_documented_logger():
    modules = [module for name, module in sys.modules.items() if name.startswith("idempotency.")]
    names = {module.logger.name for module in modules if hasattr(module, "logger")}
    assert {"idempotency"} <= names <= {"idempotency", "idempotency.audit", "idempotency.events"}


def test_every_fault_point_is_used_in_the_code_and_does_nothing():
    code = "".join(path.read_text() for path in Path(idempotency.__file__).parent.rglob("*.py"))
    assert set(re.findall(r'fault_point\["([\w.]+)"\]', code)) == set(faults.PLACES)
    faults.disarm()
    assert [place for place in faults.PLACES if faults.fault_point[place]() is not None] == []
