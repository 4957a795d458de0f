"""The outbox in the admin: which messages wait and for how long, why one is dead, and having it tried again.

Nothing is edited. Requeueing goes through ``messages.requeue``, after a page that says what it means, and with the
permission ``idempotency.requeue_outboxmessage``. Payloads and headers may hold secrets: they are loaded for, and shown
to, nobody without the permission ``idempotency.view_payload``.

The table holds all that was sent within ``TTL``, so nothing here counts it whole or sorts it by a column without index.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any
from uuid import UUID

from django import forms
from django.contrib import admin
from django.contrib import messages as notes
from django.core.exceptions import BadRequest
from django.db.models import QuerySet
from django.db.models.functions import Now
from django.http import HttpRequest, HttpResponse

from ..models import MessageStatus, OutboxMessage
from ..outbox import alias
from ..outbox.backlog import requeue
from ..upkeep.resolutions import ResolutionRefusedError
from .decisions import MAX_DECIDED, ReasonForm, page
from .display import NONE, ReadOnlyAdmin, StateFilter, preformatted, time_left, written

_SECRET_FIELDS = ("payload", "headers")

_STATES: dict[str, tuple[str, Callable[[QuerySet[OutboxMessage]], QuerySet[OutboxMessage]]]] = {
    "due": ("pending, due", lambda found: found.filter(status=MessageStatus.PENDING, next_try_at__lte=Now())),
    "waiting": (
        "pending, not due yet",
        lambda found: found.filter(status=MessageStatus.PENDING, next_try_at__gt=Now()),
    ),
    "dead": ("dead", lambda found: found.filter(status=MessageStatus.DEAD)),
    "sent": ("sent", lambda found: found.filter(status=MessageStatus.SENT)),
}


class MessageStatusFilter(StateFilter):
    states = _STATES


@admin.register(OutboxMessage)
class OutboxMessageAdmin(ReadOnlyAdmin):
    list_display = ("message_id", "topic", "account_id", "current_state", "attempts", "age", "next_try", "ordering_key")
    list_filter = (MessageStatusFilter,)
    search_fields = ("message_id",)  # how they are searched: get_search_results()
    search_help_text = "A message's id, or the key that its consumer claims, which ends in it."
    ordering = ("-id",)
    sortable_by = ()
    actions = ("requeue",)

    @admin.action(description="Requeue", permissions=["requeue"])
    def requeue(self, request: HttpRequest, queryset: QuerySet[OutboxMessage]) -> HttpResponse | None:
        if "decided" not in request.POST:
            found = list(queryset[: MAX_DECIDED + 1])
            if len(found) > MAX_DECIDED:
                self.message_user(request, f"Requeue: select up to {MAX_DECIDED} at a time.", notes.ERROR)
                return None
            return self._ask(request, found, ReasonForm())
        form = ReasonForm(request.POST)
        try:
            seen = [int(token) for token in request.POST.getlist("seen")][:MAX_DECIDED]
        except ValueError as error:
            raise BadRequest("The form names no messages.") from error
        # Not from the selection, which is filtered anew: a message that was sent meanwhile may not be in it any more,
        # and that has to be said.
        found_now = self.get_queryset(request).in_bulk(seen)
        if not form.is_valid():
            return self._ask(request, list(found_now.values()), form)
        decided = sum(self._requeue(request, pk, found_now.get(pk), form) for pk in seen)
        if decided:
            self.message_user(request, f"Requeue: {decided} message{'' if decided == 1 else 's'}.", notes.SUCCESS)
        return None

    def _requeue(self, request: HttpRequest, pk: int, message: OutboxMessage | None, form: forms.Form) -> bool:
        if message is None:
            self.message_user(request, f"Message {pk} is gone: it was purged.", notes.ERROR)
            return False
        try:
            requeue(message, by=request.user, reason=form.cleaned_data["reason"])
        except ResolutionRefusedError as error:
            self.message_user(request, str(error), notes.ERROR)
            return False
        return True

    def _ask(self, request: HttpRequest, found: list[OutboxMessage], form: forms.Form) -> HttpResponse:
        return page(
            self,
            request,
            "admin/idempotency/outboxmessage/requeue.html",
            title="Requeue",
            action="requeue",
            seen=[{"token": str(message.pk), "pk": message.pk} for message in found],
            rows=[(message.topic, message.message_id, self.current_state(message), message.error) for message in found],
            form=form,
        )

    def has_requeue_permission(self, request: HttpRequest) -> bool:
        return request.user.has_perm("idempotency.requeue_outboxmessage")

    def lookup_allowed(self, lookup: str, value: Any, request: HttpRequest) -> bool:
        # By default any column can be filtered on in the URL, and payload__contains would tell, one letter at a time,
        # what may not be shown.
        return lookup in {"message_id", "state"}

    def get_queryset(self, request: HttpRequest) -> QuerySet[OutboxMessage]:
        # From the database that is written to: a replica may show as waiting what was sent.
        found: QuerySet[OutboxMessage] = super().get_queryset(request).using(alias())
        return found.annotate(database_time=Now()).defer(*_SECRET_FIELDS)

    def get_search_results(
        self, request: HttpRequest, queryset: QuerySet[Any], search_term: str
    ) -> tuple[QuerySet[Any], bool]:
        """By the id, which is the one column that an index finds: alone, or at the end of the consumer's key."""
        term = search_term.strip()
        if not term:
            return queryset, False
        try:
            return queryset.filter(message_id=UUID(term.rpartition(".")[2])), False
        except ValueError:
            return queryset.none(), False

    def get_fieldsets(self, request: HttpRequest, obj: OutboxMessage | None = None) -> Any:
        content = ["topic", "sender", "ordering_key"]
        if request.user.has_perm("idempotency.view_payload"):
            content += ["all_headers", "content"]
        return [
            (None, {"fields": ["message_id", "account_id", "idempotency_key"]}),
            ("State", {"fields": ["current_state", "attempts", "age", "next_try", "last_error"]}),
            ("Times", {"fields": ["created_at", "next_try_at", "lease_expires_at", "sent_at"]}),
            ("Message", {"fields": content}),
        ]

    @admin.display(description="state")
    def current_state(self, message: OutboxMessage) -> str:
        if message.status != MessageStatus.PENDING:
            return message.status
        if message.lease_expires_at is not None:
            held = time_left(message, message.lease_expires_at) > timedelta(0)
            return "being sent" if held else "pending, its relay disappeared"
        return _STATES["waiting" if time_left(message, message.next_try_at) > timedelta(0) else "due"][0]

    @admin.display(description="age")
    def age(self, message: OutboxMessage) -> str:
        return written(-time_left(message, message.created_at))

    @admin.display(description="next try")
    def next_try(self, message: OutboxMessage) -> str:
        if message.status != MessageStatus.PENDING:
            return NONE
        left = time_left(message, message.next_try_at)
        return f"in {written(left)}" if left > timedelta(0) else f"due for {written(-left)}"

    @admin.display(description="last error")
    def last_error(self, message: OutboxMessage) -> str:
        return preformatted(message.error)

    @admin.display(description="headers")
    def all_headers(self, message: OutboxMessage) -> str:
        return preformatted("\n".join(f"{name}: {value}" for name, value in message.headers.items()))

    @admin.display(description="payload")
    def content(self, message: OutboxMessage) -> str:
        return preformatted(message.payload)
