"""A handler's random response, and how a judge reads it back. Both are independent of the package."""

import json

from django.db import transaction
from django.http import HttpResponse

JSON, BYTES = "application/json", "application/octet-stream"
#: The kinds of answers: the status, and the type of the content. Operations that draw one record every status.
KINDS = {
    "created": (201, JSON),
    "refused": (402, JSON),
    "invalid": (422, "text/plain"),
    "failed": (502, JSON),
    "large": (201, JSON),
    "file": (200, BYTES),  # recorded by a reference
    "undone": (402, JSON),  # after the handler has marked its transaction for rollback
}
#: The kinds that keep the handler's writes.
KEPT = [kind for kind in KINDS if kind != "undone"]
LARGE = "x" * 20_000
#: The key under which a body that isn't plain JSON is stored.
ENVELOPE = "$idempotency-envelope"


def draw(kinds, number):
    return kinds[number % len(kinds)]


def answer(claim, kind, **facts):
    """The answer of an attempt: its number, the kind, and other facts."""
    facts |= {"attempt": claim.attempt, "kind": kind}
    if kind == "large":
        facts["padding"] = LARGE
    text = json.dumps(facts)
    if kind == "file":
        claim.reference = text
    if kind == "undone":
        transaction.set_rollback(True)
    status, content_type = KINDS[kind]
    return HttpResponse(text, content_type, status)


def rebuild(reference, request):
    """Rebuild the response with the file."""
    status, content_type = KINDS["file"]
    return HttpResponse(reference, content_type, status)


#: The options of an operation that may return any of them.
DECLARED = {"recordable": lambda status: True, "rebuild": rebuild}


def facts_of(content):
    """The facts in an outcome; None for any other answer, such as the package's refusals."""
    try:
        facts = json.loads(content)
    except ValueError:
        return None
    return facts if isinstance(facts, dict) and "attempt" in facts else None


def recorded_facts(body, reference):
    """The facts in a record's outcome, from its columns."""
    if reference is not None:
        return facts_of(reference)
    kept = json.loads(body) if isinstance(body, str) else body
    return facts_of(kept[ENVELOPE]["data"]) if ENVELOPE in kept else kept
