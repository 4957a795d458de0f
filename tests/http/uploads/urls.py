"""Operations that read their request in different ways. Each returns the number of bytes that it read."""

from django.http import JsonResponse
from django.urls import path
from django.views.decorators.csrf import csrf_exempt
from rest_framework.parsers import FileUploadParser, MultiPartParser
from rest_framework.response import Response
from rest_framework.views import APIView

from idempotency import idempotent
from idempotency.http.accounts import Fixed
from idempotency.http.key_sources import FromForm
from testproject.models import Transfer

EVERYONE = Fixed("everyone")


def digest(request):
    return request.headers["Digest"]


def transferred(size):
    Transfer.objects.create(account_id=1, recipient="carol", amount=1)
    return {"size": size}


@csrf_exempt
@idempotent("uploads.form", account=EVERYONE)
def form(request):
    return JsonResponse(transferred(request.FILES["file"].size), status=201)


@csrf_exempt
@idempotent("uploads.key", account=EVERYONE, key=FromForm("key"), key_required=False)
def form_with_key(request):
    return JsonResponse(transferred(request.FILES["file"].size), status=201)


@csrf_exempt
@idempotent("uploads.body", account=EVERYONE)
def body(request):
    return JsonResponse(transferred(len(request.body)), status=201)


@csrf_exempt
@idempotent("uploads.command", account=EVERYONE, payload=digest)
def command(request):
    return JsonResponse(transferred(len(request.body)), status=201)


@csrf_exempt
@idempotent("uploads.stream", account=EVERYONE, payload=digest)
def stream(request):
    return JsonResponse(transferred(sum(len(data) for data in iter(lambda: request.read(65_536), b""))), status=201)


@csrf_exempt
@idempotent("uploads.server", account=EVERYONE, payload=digest)
def server(request):
    """Django treats a chunked body as empty."""
    return JsonResponse(transferred(len(request.environ["wsgi.input"].read())), status=201)


class FormView(APIView):
    authentication_classes = permission_classes = ()
    parser_classes = (MultiPartParser,)

    @idempotent("uploads.drf", account=EVERYONE)
    def post(self, request):
        return Response(transferred(request.data["file"].size), status=201)


class FileView(APIView):
    authentication_classes = permission_classes = ()
    parser_classes = (FileUploadParser,)

    @idempotent("uploads.file", account=EVERYONE)
    def post(self, request):
        return Response(transferred(request.data["file"].size), status=201)


urlpatterns = [
    path("health/", lambda request: JsonResponse({})),
    path("form/", form),
    path("key/", form_with_key),
    path("body/", body),
    path("command/", command),
    path("stream/", stream),
    path("server/", server),
    path("drf/", FormView.as_view()),
    path("file/", FileView.as_view()),
]
