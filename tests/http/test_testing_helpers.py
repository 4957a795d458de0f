"""Records in the state that a test starts from, and clients that send keys."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from django.http import JsonResponse

from idempotency import PARK, idempotent
from idempotency.contrib import pytest as fixtures
from idempotency.contrib.rest_framework.testing import IdempotentAPIClient
from idempotency.models import IdempotencyRecord
from idempotency.testing import IdempotentClient, abandoned, completed, expired, in_progress
from tests.factories import RecordFactory
from tests.http.callers import Caller, effects, problem_code
from tests.http.serving import Serve
from tests.http.views import plain_answer

idempotent_client = fixtures.idempotent_client
idempotent_api_client = fixtures.idempotent_api_client


@pytest.fixture
def case(request: pytest.FixtureRequest) -> None:
    """How Django isolates the test: must be asked for before what writes."""
    request.getfixturevalue(request.param)


def other_answer() -> JsonResponse:
    return JsonResponse({"by": "another attempt"}, status=202)


#: What a retry gets in each state: a status, the code of the problem, and how many effects there are then.
STATES: dict[str, tuple[Callable[[Any], IdempotencyRecord], int, str, int]] = {
    "in progress": (in_progress, 409, "idempotency_in_progress", 1),
    "abandoned": (abandoned, 201, "", 2),
    "expired": (expired, 201, "", 2),
    "completed": (lambda record: completed(record, other_answer()), 202, "", 1),
}


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("case", ["db", "transactional_db"], indirect=True)
def test_a_retry_finds_the_state(case: None, state: str, serve: Serve, alice: Caller) -> None:
    bring, status, code, wrote = STATES[state]
    serve(idempotent("kit.states")(plain_answer))
    alice.post(key="k")
    record = bring("k")
    assert record == IdempotencyRecord.objects.get()
    assert bring(record).status == record.status  # from the state itself, and by the record
    retry = alice.post(key="k")
    assert retry.status_code == status
    assert effects() == wrote
    if code:
        assert problem_code(retry) == code
    if state == "completed":
        assert (retry.content, retry["Idempotency-Replayed"]) == (other_answer().content, "true")


@pytest.mark.django_db
def test_a_claim_is_brought_from_one_state_to_another(serve: Serve, alice: Caller) -> None:
    serve(idempotent("kit.parking", transaction=False, recovery=PARK)(plain_answer))
    alice.post(key="k")
    for bring, code in ((abandoned, "idempotency_outcome_unknown"), (in_progress, "idempotency_in_progress")):
        bring("k")
        assert problem_code(alice.post(key="k")) == code
    expired("k")
    assert alice.post(key="k").status_code == 201


@pytest.mark.django_db
def test_a_record_that_is_not_clear_is_refused() -> None:
    with pytest.raises(LookupError, match=r"No record has the key .*Send the request to a protected view first"):
        in_progress("nobody")
    for account in "12":
        RecordFactory(account_id=account, idempotency_key="shared", operation="kit.undeclared")
    with pytest.raises(LookupError, match=r"Several records have the key .*Pass one of the records"):
        expired("shared")
    with pytest.raises(LookupError, match=r"No operation 'kit\.undeclared' is declared"):
        in_progress(IdempotencyRecord.objects.first())


def test_a_client_sends_a_new_key_with_each_mutating_request(
    idempotent_client: IdempotentClient, idempotent_api_client: IdempotentAPIClient
) -> None:
    for client in (idempotent_client, idempotent_api_client):

        def key_of(method: str, client: Any = client, **options: Any) -> str | None:
            sent: str | None = getattr(client, method)("/health/", **options).wsgi_request.headers.get(
                "Idempotency-Key"
            )
            return sent

        sent = {key_of(method) for method in ("post", "put", "patch", "delete")}
        assert len(sent) == 4
        assert None not in sent
        assert {key_of(method) for method in ("get", "head", "options")} == {None}
        assert key_of("post", headers={"Idempotency-Key": "given"}) == "given"
    assert (
        IdempotentClient(headers={"Idempotency-Key": "always"}).post("/health/").wsgi_request.headers["Idempotency-Key"]
        == "always"
    )
    idempotent_api_client.credentials(HTTP_IDEMPOTENCY_KEY="credential")
    assert key_of("post") == "credential"


def test_pytest_loads_the_fixtures_without_django_settings(tmp_path: Path) -> None:
    (tmp_path / "test_nothing.py").write_text("def test_nothing(): pass")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "idempotency.contrib.pytest", "--fixtures", "-c", os.devnull]
    environment = {"PYTHONPATH": ":".join(sys.path), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PATH": os.environ["PATH"]}
    loaded = subprocess.run(
        [*command, str(tmp_path)], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert loaded.returncode == 0, loaded.stdout + loaded.stderr
    assert "idempotent_client" in loaded.stdout
