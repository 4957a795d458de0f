"""A test that exceeds its time limit fails, and no other test does."""

import os
import re
import subprocess
import sys

from tests.harness.world import own_database
from tests.harness.zygote import ROOT

#: Every second test sends itself the signal by which pytest-timeout ends a test. pytest-django keeps their order.
TESTS = """
import signal

import pytest
from django.db import connection, transaction
from testproject.models import Transfer

def be_cut_off():
    connection.ensure_connection()
    if connection.vendor == "postgresql":
        connection.connection.pgconn.send_query(b"SELECT 1")
    signal.raise_signal(signal.SIGALRM)

@pytest.mark.django_db
def test_in_a_transaction():
    with transaction.atomic():
        be_cut_off()

@pytest.mark.django_db
def test_next_in_a_transaction():
    assert not Transfer.objects.exists()

@pytest.mark.django_db(transaction=True)
def test_of_a_query():
    be_cut_off()

@pytest.mark.django_db(transaction=True)
def test_next():
    assert not Transfer.objects.exists()

@pytest.mark.django_db(transaction=True)
def test_of_a_block_that_is_never_left():
    transaction.atomic().__enter__()
    Transfer.objects.exists()
    be_cut_off()

@pytest.mark.django_db(transaction=True)
def test_after_it():
    with transaction.atomic(durable=True):
        assert not Transfer.objects.exists()
"""


def test_a_test_that_times_out_fails_alone(tmp_path):
    (tmp_path / "conftest.py").write_text('pytest_plugins = ["tests.conftest"]')
    (tmp_path / "test_cut_off.py").write_text(TESTS)
    options = ["-c", ROOT / "pyproject.toml", f"--rootdir={tmp_path}", "-p", "no:randomly", "--timeout=240", "-v"]
    with own_database(os.environ["DATABASE_URL"]) as url:
        ended = subprocess.run(
            [sys.executable, "-m", "pytest", *options, tmp_path],
            cwd=ROOT,
            env={**os.environ, "DATABASE_URL": url},
            capture_output=True,
            text=True,
        )
    assert re.findall(r"(PASSED|FAILED|ERROR) +\[", ended.stdout) == ["FAILED", "PASSED"] * 3, ended.stdout
    assert ended.stdout.count("from pytest-timeout") >= 3
