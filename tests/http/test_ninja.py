"""Django Ninja: sync and async routes under ``@idempotent``, and their description in the schema."""

import json
from io import BytesIO

import pytest
from django.core.exceptions import ImproperlyConfigured, PermissionDenied
from django.db import connection
from django.http import HttpRequest, HttpResponse
from django.urls import path, resolve
from django.utils.functional import SimpleLazyObject
from rest_framework.authtoken.models import Token

from idempotency import ACCEPTED, idempotent
from idempotency.models import IdempotencyRecord
from testproject.models import Transfer
from tests.http.callers import effects, multipart, problem_code, replayed

ninja = pytest.importorskip("ninja", reason="Django Ninja is not installed")

from ninja.decorators import decorate_view  # noqa: E402
from ninja.errors import HttpError  # noqa: E402
from ninja.security import APIKeyHeader  # noqa: E402
from ninja.testing import TestClient  # noqa: E402

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.once]

PAYLOAD = {"amount": 5}


class TransferIn(ninja.Schema):
    amount: int


class TransferOut(ninja.Schema):
    id: int
    amount: int


class ApiToken(APIKeyHeader):
    """Ninja's authentication sets ``request.auth`` and leaves ``request.user`` anonymous."""

    param_name = "Authorization"

    def authenticate(self, request: HttpRequest, key):
        token = Token.objects.filter(key=(key or "").removeprefix("Token ")).select_related("user").first()
        return None if token is None else token.user


def protect(name="tests.ninja", **policy):
    return idempotent(name, **{"account": lambda request: str(request.auth.pk), **policy})


def transfer(request, amount):
    return Transfer.objects.create(account=request.auth, recipient="carol", amount=amount)


@pytest.fixture
def api(settings):
    api = ninja.NinjaAPI(auth=ApiToken(), urls_namespace="tests")
    # The URLs are read on the first request, after the routes are declared.
    settings.ROOT_URLCONF = SimpleLazyObject(lambda: (path("", api.urls),))
    return api


async def create_async(request, payload: "TransferIn"):  # a string, as under annotations from __future__
    return await Transfer.objects.acreate(account=request.auth, recipient="carol", amount=payload.amount)


def create_in_a_transaction(request: HttpRequest, payload: TransferIn):
    assert connection.in_atomic_block
    return transfer(request, payload.amount)


@pytest.mark.parametrize("create", [create_in_a_transaction, create_async])
def test_a_route_takes_effect_once(api, alice, transport, create):
    api.post("/", response={201: TransferOut})(protect()(create))

    first, _ = replayed(alice, data=PAYLOAD)
    assert (first.status_code, json.loads(first.content)["amount"]) == (201, 5)
    assert problem_code(alice.post(data={"amount": 6}, key="k")) == "idempotency_key_reused"
    assert problem_code(alice.post(data=PAYLOAD)) == "idempotency_key_missing"
    assert effects() == 1


def test_an_account_from_ninjas_authentication_must_be_declared(api, alice):
    @api.post("/")
    @idempotent("tests.undeclared")
    def create(request: HttpRequest): ...

    assert problem_code(alice.post(key="k")) == "idempotency_account_required"


def test_an_error_is_rolled_back_and_recorded_unless_transient(api, alice):
    errors = {402: HttpError(402, "declined"), 403: PermissionDenied(), 503: HttpError(503, "busy")}

    @api.post("/")
    @protect()
    def create(request: HttpRequest, status: int):
        transfer(request, 1)
        raise errors[status]

    for status in errors:
        answers = [alice.post(f"/?status={status}", key=str(status)) for _ in range(2)]
        assert [answer.status_code for answer in answers] == [status, status]
        assert ["Idempotency-Replayed" in answer for answer in answers] == [False, status < 500]
    assert effects() == 0


def test_errors_are_answered_by_the_projects_own_handlers(api, alice):
    class DeclinedError(Exception): ...

    class BrokenHandlerError(Exception): ...

    @api.exception_handler(DeclinedError)
    def answer(request: HttpRequest, error: Exception) -> HttpResponse:
        if "broken" in request.GET:
            raise BrokenHandlerError
        return api.create_response(request, {"declined": True}, status=402)

    @api.post("/")
    @protect()
    def create(request: HttpRequest):
        raise DeclinedError if "crash" not in request.GET else ZeroDivisionError

    assert [(alice.post(key="k").status_code) for _ in range(2)] == [402, 402]
    for trouble in ("crash", "broken"):
        assert alice.post(f"/?{trouble}=1", key=trouble).status_code == 500
    assert set(IdempotencyRecord.objects.values_list("status", flat=True)) == {"completed", "recoverable"}


def test_headers_set_by_the_handler_and_an_empty_body_are_replayed(api, alice):
    @api.post("/", response={204: None})
    @protect()
    def create(request: HttpRequest, response: HttpResponse):
        response["Location"] = f"/transfers/{transfer(request, 1).pk}/"

    first, replay = replayed(alice)
    assert (first.status_code, first.content) == (204, b"")
    assert first["Location"] == replay["Location"]


def test_a_route_is_protected_for_any_single_method(api, alice):
    @api.put("/put")
    @protect("tests.ninja_put")
    def put(request: HttpRequest):
        return transfer(request, 1).pk

    @api.api_operation(["GET", "POST"], "/both")
    @protect("tests.ninja_both")
    def both(request: HttpRequest):
        return request.method

    replayed(alice, "/put", method="PUT")
    assert "Idempotency-Key" not in alice.get("/both", key="k")
    assert alice.post("/both", key="k")["Idempotency-Key"] == "k"
    paths = api.get_openapi_schema(path_prefix="")["paths"]
    assert 409 in paths["/put"]["put"]["responses"]
    assert 409 not in paths["/both"]["post"]["responses"]  # Ninja describes all methods of a route as one


@pytest.mark.parametrize("method", ["put", "patch"])
def test_a_form_is_compared_by_its_parts(api, settings, alice, transport, method):
    def request(content, boundary):
        form = multipart({"amount": "5", "file": BytesIO(content)}, boundary)
        return alice.request(method.upper(), "/file", key="k", **form)

    settings.MIDDLEWARE = [*settings.MIDDLEWARE, "ninja.compatibility.files.fix_request_files_middleware"]

    @getattr(api, method)("/file")
    @protect("tests.ninja_file")
    def change(request: HttpRequest, amount: ninja.Form[int], file: ninja.File[ninja.UploadedFile]):
        return {"id": transfer(request, amount).pk, "size": file.size}

    first = request(b"one", "one")
    assert json.loads(first.content)["size"] == 3
    assert request(b"one", "two").content == first.content
    assert problem_code(request(b"two", "one")) == "idempotency_key_reused"
    assert effects() == 1


def test_a_router_may_be_nested_and_its_test_client_works(api, alice):
    router, outer = ninja.Router(), ninja.Router()

    @decorate_view(lambda run: run)
    @router.post("/transfers/{number}")
    @decorate_view(lambda run: lambda request, **values: run(request, **values))
    @protect()
    def create(request: HttpRequest, number: int, payload: TransferIn):
        return {"number": number, "id": transfer(request, payload.amount).pk}

    outer.add_router("/inner", router)
    api.add_router("/outer", outer)
    replayed(alice, "/outer/inner/transfers/1", PAYLOAD)
    assert problem_code(alice.post("/outer/inner/transfers/2", PAYLOAD, key="k")) == "idempotency_key_reused"
    headers = {
        "AUTHORIZATION": f"Token {alice.token.key}",
        "IDEMPOTENCY-KEY": "test",
    }  # as Ninja's client requires
    answers = [TestClient(api).post("/outer/inner/transfers/1", json=PAYLOAD, headers=headers) for _ in range(2)]
    assert (answers[1].status_code, answers[1]["Idempotency-Replayed"]) == (200, "true")


def test_one_function_on_two_paths_is_two_places_unless_named(api, alice):
    """Ninja names every pattern after the function."""
    router = ninja.Router()

    @api.post("/old", url_name="transfers")
    @api.post("/new", url_name="transfers")
    @router.post("/c")
    @api.post("/b")
    @api.post("/a")
    @protect()
    def create(request: HttpRequest):
        return transfer(request, 1).pk

    api.add_router("/first", router)
    places = ["/a", "/b", "/first/c"]
    assert len({resolve(place).view_name for place in places}) == 1
    for key, place in zip("abc", places, strict=True):
        replayed(alice, place, key=key)
        for other in {*places} - {place}:
            assert problem_code(alice.post(other, key=key)) == "idempotency_key_reused"
    first, _ = replayed(alice, "/old")
    assert alice.post("/new", key="k").content == first.content


def test_a_route_that_could_not_be_protected_is_refused(api):
    def stream(request: HttpRequest): ...

    with pytest.raises(ImproperlyConfigured, match="protects nothing"):
        api.post("/a")(protect("tests.ninja_put_only", methods=["PUT"])(stream))

    hide = decorate_view(lambda run: lambda request, **values: run(request, **values))
    with pytest.raises(ImproperlyConfigured, match="decorate_view"):
        api.post("/b")(protect("tests.ninja_hidden")(hide(stream)))
    with pytest.raises(ImproperlyConfigured, match="is above Ninja's decorator"):
        protect("ninja.above")(api.post("/above")(lambda request: None))
    streaming = pytest.importorskip("ninja.streaming", reason="this Django Ninja has no streams")
    with pytest.raises(ImproperlyConfigured, match="streams"):
        api.post("/c", response=streaming.SSE[TransferOut])(protect("tests.ninja_stream")(stream))


def described(api, policy={}, **route):  # noqa: B006 - never changed
    @api.post("/", **route)
    @protect(**policy)
    def create(request: HttpRequest, payload: TransferIn): ...

    # Sorted, as the export_openapi_schema command may write it.
    return json.loads(json.dumps(api.get_openapi_schema(path_prefix=""), sort_keys=True))["paths"]["/"]["post"]


def test_the_schema_describes_the_header_and_the_answers(api):
    models = {201: TransferOut, 409: TransferOut, ...: TransferOut}
    operation = described(api, response=models, policy={"in_progress": ACCEPTED})
    (header,) = operation["parameters"]
    assert (header["name"], header["in"], header["required"]) == ("Idempotency-Key", "header", True)
    responses = operation["responses"]
    assert responses.keys() == {"201", "202", "400", "401", "409", "422", "503"}
    assert responses["409"]["content"].keys() == {"application/json", "application/problem+json"}
    assert responses["409"]["description"] == "Conflict"
    assert responses["422"]["content"]["application/problem+json"]["schema"]["required"][-1] == "retryable"


def test_a_routes_own_description_wins(api):
    own = {
        "parameters": [{"name": "idempotency-key", "in": "header", "description": "Own.", "schema": {}}],
        "responses": {"409": {"description": "Own."}},
    }
    operation = described(api, openapi_extra=own)
    assert [parameter["description"] for parameter in operation["parameters"]] == ["Own."]
    assert operation["responses"]["409"]["description"] == "Own."
    assert "Retry-After" in operation["responses"]["409"]["headers"]


def test_a_declared_header_parameter_stays_the_only_one(api):
    @api.post("/")
    @protect()
    def create(request: HttpRequest, idempotency_key: str = ninja.Header()): ...

    assert len(api.get_openapi_schema(path_prefix="")["paths"]["/"]["post"]["parameters"]) == 1


def test_errors_of_another_shape_or_under_wrong_settings_are_undescribed(api, settings):
    settings.IDEMPOTENCY = {"ERROR_RESPONSE": lambda request, error: HttpResponse()}
    assert "content" not in described(api)["responses"]["422"]
    settings.IDEMPOTENCY = {"KEY_REQUIRED": 1}
    assert described(ninja.NinjaAPI(urls_namespace="wrong"), {"name": "tests.ninja_wrong"})["responses"].keys() == {
        "200"
    }
