"""*Move from another package*: each section's three steps, with the real package installed beside this one."""

import json
import subprocess
import sys

import pytest

from tests.contrib.project import PROJECT
from tests.docs.pages import blocks

PHASES = """
import itertools, uuid
from types import ModuleType
from unittest.mock import patch
from django.contrib.auth.models import User
from django.http import JsonResponse
from django.test import Client, override_settings
from idempotency import Operation, checks_nothing, idempotent
from rest_framework.decorators import api_view, authentication_classes
from rest_framework.authentication import SessionAuthentication
from rest_framework.response import Response
from rest_framework.views import APIView

transfers = Operation.declare("transfers.create")  # each deploy declares it once
user = User.objects.create_user("carol")
report = {}

def phase(view, key, middleware):
    "One deploy answers one request: its status, whether this package replayed it, and the number of the run."
    urls = ModuleType("urls")
    urls.urlpatterns = [path("transfers/", view)]
    sys.modules["urls"] = urls
    with override_settings(ROOT_URLCONF=urls, MIDDLEWARE=[*settings.MIDDLEWARE, *middleware]):
        client = Client()
        client.force_login(user)
        answer = client.post("/transfers/", {"amount": 5}, "application/json", headers={"Idempotency-Key": key})
    return answer.status_code, answer.headers.get("Idempotency-Replayed") == "true", answer.json()["run"]

def move(package, old, both, new, middleware):
    "The old package alone, then both, then this one."
    global runs
    runs = itertools.count(1)
    first, second = (str(uuid.uuid4()) for _ in range(2))
    report[package] = {
        "old": [phase(old, first, middleware)],
        "both": [phase(both, first, middleware), phase(both, second, middleware), phase(both, second, middleware)],
        "only": [phase(new, second, [])],
    }
"""

#: By package, what the page's steps change in a project.
PACKAGES = {
    "drf_idempotency": """
ShopConfig.ready(None)
settings.DRF_IDEMPOTENCY = {"CACHE_CLIENT_ERROR_RESPONSES": False}

def transfer(request):
    return JsonResponse({"run": next(runs)}, status=201)

protected = idempotent(transfers)(transfer)
move("drf_idempotency", transfer, protected, protected, ["drf_idempotency.middleware.IdempotencyMiddleware"])
""",
    "idempotency_key": """
from idempotency_key.decorators import idempotency_key
settings.IDEMPOTENCY_KEY = {"STORAGE": {"CLASS": "idempotency_key.storage.CacheKeyStorage"}}

@idempotency_key
def old(request):
    return JsonResponse({"run": next(runs)}, status=201)

@idempotency_key
@idempotent(transfers)
def both(request):
    return JsonResponse({"run": next(runs)}, status=201)

@idempotent(transfers)
def new(request):
    return JsonResponse({"run": next(runs)}, status=201)

move("idempotency_key", old, both, new, ["idempotency_key.middleware.IdempotencyKeyMiddleware"])
""",
    "rest_framework_idempotency_key": """
from rest_framework_idempotency_key.decorators import simple_idempotency_key_method
settings.IDEMPOTENCY_KEY_LOCK_TIMEOUT = 60

class Transfers(APIView):
    authentication_classes = [SessionAuthentication]

class Old(Transfers):
    @simple_idempotency_key_method
    def post(self, request):
        return Response({"run": next(runs)}, status=201)

class Both(Transfers):
    @idempotent(transfers)
    @checks_nothing(simple_idempotency_key_method)
    def post(self, request):
        return Response({"run": next(runs)}, status=201)

class New(Transfers):
    @idempotent(transfers)
    def post(self, request):
        return Response({"run": next(runs)}, status=201)

middleware = ["rest_framework_idempotency_key.middleware.IdempotencyKeyMiddleware"]
move("rest_framework_idempotency_key", Old.as_view(), Both.as_view(), New.as_view(), middleware)
""",
}


@pytest.mark.once
def test_no_retry_runs_again_in_any_step_of_the_move(tmp_path):
    written = [PROJECT, PHASES]
    for package, code in PACKAGES.items():
        examples = blocks("how-to/move-from-another-package.md", "python")
        written += [*(block for block in examples if f"from {package}" in block), code]
    script = tmp_path / "move.py"
    script.write_text("\n".join([*written, "print(json.dumps(report))"]))
    apps = ["rest_framework", "drf_idempotency", "rest_framework_idempotency_key"]
    done = subprocess.run([sys.executable, script, *apps], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report.keys() == PACKAGES.keys()
    for package, steps in report.items():
        repeated = [201 if package != "idempotency_key" else 409, False]  # it answers 409 for a request that is done
        assert steps["old"] == [[201, False, 1]]
        # The old package answers retries of requests from before. A new key runs once, and one of the two replays it.
        assert steps["both"][:2] == [[*repeated, 1], [201, False, 2]]
        is_first = package == "rest_framework_idempotency_key"
        assert steps["both"][2] == ([201, True, 2] if is_first else [*repeated, 2])
        assert steps["only"] == [[201, True, 2]]
