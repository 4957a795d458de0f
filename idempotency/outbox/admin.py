"""The outbox in the admin: waiting messages, the reason why a message is dead, and a button to requeue it.

Payloads and headers may hold secrets, and an error may quote them, so they need the permission ``view_payload``.

The table may be huge, so no page counts it or sorts it by a column without an index.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, ClassVar
from uuid import UUID

from django.contrib import admin
from django.contrib.admin.utils import label_for_field
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.translation import gettext, ngettext, ngettext_lazy
from django.utils.translation import gettext_lazy as _

from ..admin.decisions import Action, DecisionAdmin, ReasonForm
from ..admin.display import (
    NONE,
    StateFilter,
    format_duration,
    show_badge,
    show_text,
    show_time,
    show_with_detail,
    time_left,
)
from ..models import Now
from .models import MessageStatus, OutboxMessage, outbox_database
from .upkeep import requeue

_EXPLANATIONS: Mapping[str, Any] = {
    MessageStatus.PENDING: _(
        "It waits for a relay. If it has been due for more than a minute, no relay is running, or its broker can't be "
        "reached."
    ),
    MessageStatus.SENT: _("Its broker has confirmed the message."),
    MessageStatus.DEAD: _(
        "It was tried too often and is not tried again automatically. The last error, shown with the permission to "
        "view payloads, has the reason. Correct the cause, then requeue the message."
    ),
}
_NEWER_RELEASE = _(
    "A newer release wrote this state. The relay of this release skips the message. Finish the deploy, or deploy the "
    "newer release again."
)

REQUEUE = Action(
    name="requeue",
    title=_("Requeue"),
    consequence=ngettext_lazy(
        "This message is tried again, as often as a new one. First correct the cause of the error. If only the "
        "confirmation was lost, it is sent twice with the same id, and a consumer that claims it takes effect once.",
        "These messages are tried again, as often as new ones. First correct the cause of the error. If only the "
        "confirmation was lost, a message is sent twice with the same id, and a consumer that claims it takes effect "
        "once.",
        "count",
    ),
    permission="requeue",
    form=ReasonForm,
    decide=requeue,
    statuses=frozenset({MessageStatus.DEAD.value}),
)

#: The kind of badge of each state.
_BADGES = {"waiting": "", "due": "waiting", "dead": "stuck", "sent": "done"}


def _may_read(request: HttpRequest) -> bool:
    return request.user.has_perm("idempotency_outbox.view_payload")


class MessageStatusFilter(StateFilter):
    states: ClassVar[Mapping[str, tuple[Any, Callable[[Any], Any]]]] = {
        "due": (_("pending, due"), lambda rows: rows.filter(status=MessageStatus.PENDING, next_try_at__lte=Now())),
        "waiting": (
            _("pending, not due yet"),
            lambda rows: rows.filter(status=MessageStatus.PENDING, next_try_at__gt=Now()),
        ),
        "dead": (_("dead"), lambda rows: rows.filter(status=MessageStatus.DEAD)),
        "sent": (_("sent"), lambda rows: rows.filter(status=MessageStatus.SENT)),
    }


@admin.register(OutboxMessage)
class OutboxMessageAdmin(DecisionAdmin):
    list_display: tuple[str, ...] = ("message_id", "state_with_details", "subject", "age")
    list_filter: ClassVar[tuple[type[admin.SimpleListFilter], ...]] = (MessageStatusFilter,)
    # Shows the search box. get_search_results() searches.
    search_fields: ClassVar[tuple[str, ...]] = ("message_id",)
    search_help_text: ClassVar[Any] = _("A message's id, or its consumer's key, which ends with the id.")
    ordering: ClassVar[tuple[str, ...]] = ("-id",)
    decisions: ClassVar[tuple[Action, ...]] = (REQUEUE,)
    actions: tuple[Callable[..., HttpResponse | None], ...] = tuple(action.as_admin_action() for action in decisions)
    attempt_column = "attempts"
    hidden_columns: ClassVar[tuple[str, ...]] = ("payload", "headers", "error")  # an error may quote the payload
    allowed_lookups: ClassVar[frozenset[str]] = frozenset({"message_id", "state"})

    def database(self) -> str:
        return outbox_database()

    def decision_columns(self, request: HttpRequest) -> tuple[str, ...]:
        return ("topic", "message_id", "state", *(["error"] if _may_read(request) else []))

    def explain(self, row: OutboxMessage) -> SafeString:
        return format_html("<p>{}</p>", _EXPLANATIONS.get(row.status, _NEWER_RELEASE))

    def page_columns(self, request: HttpRequest) -> tuple[str, ...]:
        content = ("last_error", "all_headers", "content") if _may_read(request) else ()
        return ("message_id", "idempotency_key", "sender", "age", "times", *content)

    def has_requeue_permission(self, request: HttpRequest) -> bool:
        return request.user.has_perm("idempotency_outbox.requeue_outboxmessage")

    def get_search_results(
        self, request: HttpRequest, queryset: QuerySet[Any], search_term: str
    ) -> tuple[QuerySet[Any], bool]:
        """Search by id only, because no other column has an index. The consumer's key ends with the id."""
        if term := search_term.strip():
            try:
                queryset = queryset.filter(message_id=UUID(term.rpartition(".")[2]))
            except ValueError:
                queryset = queryset.none()
        return queryset, False

    @admin.display(description=_("state"))
    def state(self, message: OutboxMessage) -> str:
        if message.status == MessageStatus.PENDING and message.lease_expires_at is not None:
            if time_left(message, message.lease_expires_at) > timedelta(0):
                return show_badge("", gettext("being sent"))
            return show_badge("waiting", gettext("pending, its relay disappeared"))
        name: str = message.status
        if message.status == MessageStatus.PENDING:
            name = "waiting" if time_left(message, message.next_try_at) > timedelta(0) else "due"
        # A newer release may have written an unknown state.
        label, _filter = MessageStatusFilter.states.get(name, (name, None))
        return show_badge(_BADGES.get(name, ""), label)

    def details(self, message: OutboxMessage) -> list[str]:
        next_try, tries = self.next_try(message), ""
        if message.attempts:
            tries = ngettext("%(count)d try", "%(count)d tries", message.attempts) % {"count": message.attempts}
        return [tries, "" if next_try == NONE else next_try]

    @admin.display(description=_("topic"))
    def subject(self, message: OutboxMessage) -> str:
        account = message.account_id and gettext("account %(account)s") % {"account": message.account_id}
        return show_with_detail(message.topic, account)

    @admin.display(description=_("times"))
    def times(self, message: OutboxMessage) -> Any:
        names = ("created_at", "lease_expires_at", "sent_at")
        dated = ((label_for_field(name, OutboxMessage), getattr(message, name)) for name in names)
        return show_text("\n".join(f"{label} {show_time(moment)}" for label, moment in dated if moment is not None))

    @admin.display(description=_("next try"))
    def next_try(self, message: OutboxMessage) -> str:
        if message.status != MessageStatus.PENDING:
            return NONE
        left = time_left(message, message.next_try_at)
        if left > timedelta(0):
            return gettext("in %(duration)s") % {"duration": format_duration(left)}
        return gettext("due for %(duration)s") % {"duration": format_duration(-left)}

    @admin.display(description=_("headers"))
    def all_headers(self, message: OutboxMessage) -> str:
        return show_text("\n".join(f"{name}: {value}" for name, value in message.headers.items()))

    @admin.display(description=_("payload"))
    def content(self, message: OutboxMessage) -> str:
        return show_text(message.payload)
