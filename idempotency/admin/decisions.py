"""Decisions in the admin: an action, the page that asks for confirmation, and the buttons that lead to that page.

The page shows the state of each row at the time of the question, and the decision applies to that state only. If a row
has changed since, the person is told so, and the row is left alone.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from django.contrib import admin, messages
from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME
from django.contrib.admin.utils import label_for_field, model_ngettext
from django.core.exceptions import BadRequest, ImproperlyConfigured
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.template.response import TemplateResponse
from django.urls import reverse
from django.utils.text import capfirst
from django.utils.translation import gettext

from ..exceptions import IdempotencyError
from .display import ReadOnlyAdmin
from .forms import ReasonForm

#: A person can check this many rows on one page. For more rows, call the functions behind the actions from a script.
MAX_DECIDED = 100


@dataclass(frozen=True, kw_only=True)
class Action:
    """Something that a person may decide about a row."""

    name: str
    #: The name of the action, its button and its page.
    title: Any
    #: What the action does. The page shows it above the form.
    consequence: Any
    #: A permission as Django's admin names it: ``resolve`` stands for the method ``has_resolve_permission``.
    permission: str
    form: type[ReasonForm]
    #: Called with the row as it was seen, the arguments from the form, and ``by``, the user. The page shows its error.
    decide: Callable[..., None]
    #: The action is offered for rows in these statuses.
    statuses: frozenset[str]
    #: Whether the action takes one row at a time, because what the person enters can't be true of two rows.
    single: bool = False

    def as_admin_action(self) -> Callable[..., HttpResponse | None]:
        """The action as Django's admin takes it."""

        def respond(shown: DecisionAdmin, request: HttpRequest, selected: QuerySet[Any]) -> HttpResponse | None:
            return DecisionPage(shown, request, self).respond(selected)

        respond.__name__ = self.name
        return admin.action(description=self.title, permissions=[self.permission])(respond)


class DecisionAdmin(ReadOnlyAdmin):
    """An admin whose rows can't be edited. People make decisions about them instead."""

    change_form_template = "admin/idempotency/change_form.html"

    decisions: ClassVar[tuple[Action, ...]]
    #: The columns of the confirmation page, as in ``list_display``.
    decision_columns: ClassVar[tuple[str, ...]]
    #: The field that counts the attempts.
    attempt_column: ClassVar[str]

    @abstractmethod
    def explain(self, row: Any) -> list[Any]:
        """What the row's state means and what to do next: a list of paragraphs."""

    @abstractmethod
    def badge(self, row: Any) -> Any:
        """The row's state at a glance."""

    def page_context(self, request: HttpRequest, row: Any) -> dict[str, Any]:
        """What the row's page shows beside all that every page shows."""
        return {}

    def render_change_form(
        self,
        request: HttpRequest,
        context: dict[str, Any],
        add: bool = False,
        change: bool = False,
        form_url: str = "",
        obj: Any = None,
    ) -> HttpResponse:
        permitted = self.get_actions(request)
        context |= {
            "badge": self.badge(obj),
            "explanation": self.explain(obj),
            "offered": [one for one in self.decisions if obj.status in one.statuses and one.name in permitted],
            "checkbox_name": ACTION_CHECKBOX_NAME,
            **self.page_context(request, obj),
        }
        return super().render_change_form(request, context, add, change, form_url, obj)


@dataclass(frozen=True)
class Seen:
    """The state of a row when the person was asked. The decision applies to this state and to no later one."""

    pk: int
    attempt: int
    status: str

    @property
    def token(self) -> str:
        return f"{self.pk}:{self.attempt}:{self.status}"

    @classmethod
    def parse(cls, token: str, statuses: frozenset[str]) -> Seen:
        pk, _, rest = token.partition(":")
        attempt, _, status = rest.partition(":")
        if not pk.isdecimal() or not attempt.isdecimal() or status not in statuses:
            raise BadRequest(f"{token!r} does not name a row and its state.")
        return cls(int(pk), int(attempt), status)


class DecisionPage:
    """One request of an action: it shows the confirmation page, or carries out the decision."""

    def __init__(self, shown: DecisionAdmin, request: HttpRequest, action: Action) -> None:
        self.shown = shown
        self.opts = shown.opts
        self.request = request
        self.action = action

    def respond(self, selected: QuerySet[Any]) -> HttpResponse | None:
        """:returns: a response, or None to show the list again."""
        if "decided" not in self.request.POST:
            return self._ask_first(selected)
        # The rows come from the page's own fields and not from the selection. Django filters the selection again, so a
        # row that somebody else resolved meanwhile may be missing from it, and the person has to be told about it.
        statuses = frozenset(value for value, _ in self.opts.get_field("status").choices)  # type: ignore[union-attr]
        seen = [Seen.parse(token, statuses) for token in self.request.POST.getlist("seen")][:MAX_DECIDED]
        found = self._find(seen)
        form = self.action.form(self.request.POST)
        if not form.is_valid():
            return self._ask(list(found.values()), form)
        decided = sum(self._decide(one, found.get(one.pk), form) for one in seen)
        if decided:
            said = {"action": self.action.title, "count": decided, "items": model_ngettext(self.opts, decided)}
            self._say(gettext("%(action)s: %(count)d %(items)s.") % said, messages.SUCCESS)
        return HttpResponseRedirect(self._origin(list(found))) if self._came_from_page and found else None

    def _ask_first(self, selected: QuerySet[Any]) -> HttpResponse | None:
        found = list(selected[: MAX_DECIDED + 1])
        limit = 1 if self.action.single else MAX_DECIDED
        if len(found) > limit:
            said = {"action": self.action.title, "limit": limit}
            self._say(gettext("%(action)s: select up to %(limit)d at a time.") % said, messages.ERROR)
            return None
        return self._ask(found, self.action.form())

    def _find(self, seen: list[Seen]) -> dict[int, Any]:
        """Read the rows as they are now, but set attempt and status to what the person saw."""
        found: dict[int, Any] = self.shown.get_queryset(self.request).in_bulk([one.pk for one in seen])
        for one in seen:
            if one.pk in found:
                setattr(found[one.pk], self.shown.attempt_column, one.attempt)
                found[one.pk].status = one.status
        return found

    def _decide(self, seen: Seen, row: Any, form: ReasonForm) -> bool:
        if row is None:
            said = {"name": capfirst(self.opts.verbose_name), "pk": seen.pk}
            self._say(gettext("%(name)s %(pk)d is gone: it was purged.") % said, messages.ERROR)
            return False
        try:
            self.action.decide(row, by=self.request.user, **form.arguments())
        except (IdempotencyError, ImproperlyConfigured, ValueError) as error:
            self._say(str(error), messages.ERROR)
            return False
        return True

    def _say(self, message: str, level: int) -> None:
        self.shown.message_user(self.request, message, level)

    def _ask(self, found: list[Any], form: ReasonForm) -> HttpResponse:
        columns = self.shown.decision_columns
        context = {
            **self.shown.admin_site.each_context(self.request),
            "opts": self.opts,
            "media": self.shown.media,
            "checkbox_name": ACTION_CHECKBOX_NAME,
            "title": self.action.title,
            "action": self.action,
            "headings": [capfirst(str(label_for_field(name, self.opts.model, self.shown))) for name in columns],
            "rows": [[self._cell(row, name) for name in columns] for row in found],
            "seen": [Seen(row.pk, getattr(row, self.shown.attempt_column), row.status) for row in found],
            "form": form,
            "came_from": "page" if self._came_from_page else "",
            "back": self._origin([row.pk for row in found]),
        }
        return TemplateResponse(self.request, "admin/idempotency/decide.html", context)

    def _cell(self, row: Any, name: str) -> Any:
        return getattr(self.shown, name)(row) if hasattr(self.shown, name) else getattr(row, name)

    @property
    def _came_from_page(self) -> bool:
        """Whether the person pressed a button on a row's own page. Otherwise they chose an action in the list."""
        return self.request.POST.get("came_from") == "page"

    def _origin(self, pks: list[int]) -> str:
        """Where the person came from: the row's own page, or the list with its filters."""
        if self._came_from_page and pks:
            name = f"admin:idempotency_{self.opts.model_name}_change"
            return reverse(name, args=pks[:1], current_app=self.shown.admin_site.name)
        return self.request.get_full_path()
