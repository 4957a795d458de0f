"""The admin's pages about records, and records to show on them."""

from __future__ import annotations

from typing import Any

from django.urls import reverse

from idempotency.operation import Operation
from tests.http.admin.pages import SECRET
from tests.records import make_records

LIST = reverse("admin:idempotency_idempotencyrecord_changelist")

charges = Operation("tests.admin.charges")
refunds = Operation("tests.admin.refunds")


def detail(pk: int, view: str = "change") -> str:
    return reverse(f"admin:idempotency_idempotencyrecord_{view}", args=[pk])


def secret_record(**fields: Any) -> int:
    (pk,) = make_records(
        response_headers=[["Link", SECRET], ["Link", "second"]],
        response_body=f'{{"card": "{SECRET}"}}',
        response_reference=f"reference {SECRET}",
        **fields,
    )
    return pk
