"""The same work three ways: unprotected, protected by hand, and protected by the package.

The hand-written views are what a good engineer writes into one view for this one purpose: a digest of the request's
body, one claim, one completing update, a release on failure; no policy, no lease, no fence, no second framework.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

from django.conf import settings
from django.db import connection, transaction
from django.http import HttpResponse, JsonResponse
from rest_framework import serializers
from rest_framework.parsers import JSONParser
from rest_framework.renderers import JSONRenderer
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView

from idempotency.contrib.rest_framework import IdempotentMixin
from idempotency.operation import Operation
from idempotency.options.values import PARK
from testproject.models import Transfer

#: The same columns, constraint, indexes and collations as the package's own table.
CREATE_TABLE = "CREATE TABLE handwritten_record (LIKE idempotency_record INCLUDING ALL)"
DROP_TABLE = "DROP TABLE IF EXISTS handwritten_record"

INSERT = """
INSERT INTO handwritten_record
    (account_id, operation, idempotency_key, request_hash, status, attempt, lease_expires_at, expires_at)
VALUES (%s, 'transfers', %s, %s, 'in_progress', 1, now() + interval '1 minute', now() + interval '3 days')
ON CONFLICT (account_id, operation, idempotency_key) DO NOTHING
RETURNING id
"""
# The setting within the statement, so that it costs no round trip of its own.
INSERT_WITHOUT_DISK = INSERT.replace("1, now()", "length(set_config('synchronous_commit', 'off', true)) - 2, now()", 1)

READ = """
SELECT request_hash, status, response_status, response_body::text, response_headers::text
FROM handwritten_record
WHERE account_id = %s AND operation = 'transfers' AND idempotency_key = %s
"""

# One round trip that claims or reads: the snapshot of the SELECT is older than the insert, so one of the two answers.
INSERT_OR_READ = f"""
WITH claimed AS ({INSERT_WITHOUT_DISK})
SELECT id, NULL AS request_hash, NULL AS status, NULL AS response_status, NULL AS response_body FROM claimed
UNION ALL
SELECT NULL, request_hash, status, response_status, response_body::text FROM handwritten_record
WHERE account_id = %s AND operation = 'transfers' AND idempotency_key = %s
"""

COMPLETE = """
UPDATE handwritten_record
SET status = 'completed', completed_at = now(), lease_expires_at = NULL, response_status = 201, response_body = %s
WHERE id = %s
"""
RELEASE = "DELETE FROM handwritten_record WHERE id = %s"
#: In place of a request's, where only statements are compared.
DIGEST = "0" * 64


@contextmanager
def tables() -> Iterator[None]:
    """The hand-written views' table, during the block."""
    execute(DROP_TABLE)
    execute(CREATE_TABLE)
    try:
        yield
    finally:
        execute(DROP_TABLE)


def execute(statement: str, *parameters: Any) -> None:
    with connection.cursor() as cursor:
        cursor.execute(statement, parameters or None)


def read(scope: tuple[str, str]) -> Any:
    with connection.cursor() as cursor:
        cursor.execute(READ, scope)
        return cursor.fetchone()


class TransferSerializer(serializers.ModelSerializer[Any]):
    class Meta:
        model = Transfer
        fields: ClassVar = ["id", "recipient", "amount", "label", "created_at"]


class BareView(APIView):
    """Creates one row, in autocommit."""

    parser_classes = (JSONParser,)  # as most projects have it; the sample project's own is stricter

    def post(self, request: Request) -> Any:
        return Response(self.work(request), status=201)

    def work(self, request: Request) -> Any:
        serializer = TransferSerializer(data=request.data)
        serializer.is_valid(raise_exception=True)
        serializer.save(account=request.user)
        return serializer.data


class BareAtomicView(BareView):
    """Creates one row, in a transaction of its own making."""

    def post(self, request: Request) -> Any:
        with transaction.atomic():
            return super().post(request)


class HandwrittenView(BareView):
    """Claim, then work and outcome: two statements more than the work, and two transactions.

    The claim is in autocommit, because the server commits one statement by itself: BEGIN and COMMIT would be two round
    trips more. It doesn't wait for the disk. If the server forgets it, it has forgotten the work as well.
    """

    insert = INSERT_WITHOUT_DISK
    complete = COMPLETE

    def post(self, request: Request) -> Any:
        key = request.META.get("HTTP_IDEMPOTENCY_KEY", "")
        if not 0 < len(key) <= 255:
            return JsonResponse({"detail": "Idempotency-Key is missing or too long."}, status=400)
        digest = self.digest(request)
        scope = (str(request.user.pk), key)
        claimed, found = self.claim(scope, digest)
        return self.replay(found, digest) if claimed is None else self.run(request, claimed)

    def digest(self, request: Request) -> str:
        return hashlib.sha256(request.body).hexdigest()

    def claim(self, scope: tuple[str, str], digest: str) -> tuple[int | None, Any]:
        with connection.cursor() as cursor:
            cursor.execute(self.insert, (*scope, digest))
            won = cursor.fetchone()
        return (None, read(scope)) if won is None else (won[0], None)

    def run(self, request: Request, claimed: int) -> HttpResponse:
        try:
            with transaction.atomic():
                body = JSONRenderer().render(self.work(request))
                execute(self.complete, body.decode(), claimed)
        except Exception:  # raised on: whatever it was, a careful author frees the claim first
            execute(RELEASE, claimed)
            raise
        return HttpResponse(body, status=201, content_type="application/json")

    def replay(self, found: Any, digest: str) -> HttpResponse:
        request_hash, status, response_status, body, *_ = found
        if request_hash != digest:
            return JsonResponse({"detail": "Idempotency-Key was used with another payload."}, status=422)
        if status != "completed":
            return JsonResponse({"detail": "In progress."}, status=409)
        return HttpResponse(body, status=response_status, content_type="application/json")


class HandwrittenDurableView(HandwrittenView):
    """The claim's COMMIT waits for the disk, as it does for whoever does not think of it."""

    insert = INSERT


class HandwrittenAtomicView(HandwrittenView):
    """The claim in an ``atomic()`` of its own, as most people write it."""

    def claim(self, scope: tuple[str, str], digest: str) -> tuple[int | None, Any]:
        with transaction.atomic():
            return super().claim(scope, digest)


class HandwrittenOneStatementView(HandwrittenView):
    """The claim and the loser's read in one statement: a replay is one round trip."""

    def claim(self, scope: tuple[str, str], digest: str) -> tuple[int | None, Any]:
        with connection.cursor() as cursor:
            cursor.execute(INSERT_OR_READ, (*scope, digest, *scope))
            won, *found = cursor.fetchone()
        return won, found


class HandwrittenPromisesView(HandwrittenView):
    """What the package promises on these two paths, in one view: a keyed digest of the payload's values, bounded waits,
    a claim that is refused in an open transaction, a fence, recorded headers, and a replay that is DRF's own response.
    """

    insert = INSERT_WITHOUT_DISK.replace("length(", "length(set_config('lock_timeout', '1s', true) || ").replace(
        "- 2", "- 4"
    )
    complete = COMPLETE.replace("response_body", "response_headers = %s, response_body") + (
        "AND attempt = 1 AND request_hash = %s AND status || '' = 'in_progress'"
        " AND set_config('idle_in_transaction_session_timeout', '5s', true) <> ''"
    )

    def digest(self, request: Request) -> str:
        payload = [request.method, request._request.path, json.loads(request._request.body)]
        text = json.dumps(payload, sort_keys=True, separators=(",", ":"))
        self.sent = hmac.digest(settings.SECRET_KEY.encode(), text.encode(), "sha256").hex()
        return self.sent

    def claim(self, scope: tuple[str, str], digest: str) -> tuple[int | None, Any]:
        with transaction.atomic(durable=True):
            connection.connection.autocommit = True  # the server commits each statement by itself
            return super().claim(scope, digest)

    def run(self, request: Request, claimed: int) -> HttpResponse:
        with transaction.atomic(durable=True), connection.cursor() as cursor:
            response = self.finalize_response(request, Response(self.work(request), status=201)).render()
            headers = json.dumps(list(response.items()))
            cursor.execute(self.complete, (headers, response.content.decode(), claimed, self.sent))
            assert cursor.rowcount == 1, "another attempt owns the record"
        return response

    def replay(self, found: Any, digest: str) -> HttpResponse:
        answer = super().replay(found, digest)
        if answer.status_code >= 400:
            return answer
        response = Response(json.loads(answer.content), status=answer.status_code, headers=dict(json.loads(found[4])))
        response.content = answer.content
        response["Idempotency-Replayed"] = "true"
        return response


class PackageView(IdempotentMixin, BareView):
    idempotent_operations: ClassVar = {"post": "benchmarks.transfers"}


class PackageAtomicView(IdempotentMixin, BareAtomicView):
    """The view's own ``atomic()`` is a savepoint in the package's transaction."""

    idempotent_operations: ClassVar = {"post": "benchmarks.atomic"}


class PackageDurableView(IdempotentMixin, BareView):
    """The claim's COMMIT waits for the disk, because the operation could not bear to lose it."""

    idempotent_operations: ClassVar = {"post": Operation("benchmarks.durable", recovery=PARK)}
