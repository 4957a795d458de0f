"""Decisions in the admin: an action, the page that asks for confirmation, and the buttons that lead to that page.

The page shows the state of each row at the time of the question, and the decision applies to that state only. If a row
has changed since, the page says so, and the row is left alone.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final

from django import forms
from django.contrib import admin, messages
from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME
from django.contrib.admin.utils import label_for_field, model_ngettext
from django.contrib.admin.widgets import AdminTextInputWidget
from django.core.exceptions import BadRequest, ImproperlyConfigured
from django.db.models import BigIntegerField, Model, QuerySet
from django.db.models.functions import Now
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.template.loader import render_to_string
from django.template.response import TemplateResponse
from django.utils.safestring import SafeString
from django.utils.text import capfirst
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from ..exceptions import IdempotencyError
from .display import NONE, ReadOnlyAdmin, format_duration, show_text, show_with_detail, time_left, url_of

#: A person can check this many rows on one page. For more rows, call the functions behind the actions from a script.
MAX_DECIDED = 100


class ReasonForm(forms.Form):
    """:param rows: the rows that the decision is about."""

    reason: forms.CharField = forms.CharField(
        label=_("Reason"),
        max_length=500,
        help_text=_("How you know. The reason is kept in the history and in the log."),
        widget=AdminTextInputWidget,
    )

    def __init__(self, *args: Any, rows: Sequence[Any], **options: Any) -> None:
        super().__init__(*args, **options)
        self.rows = rows

    def arguments(self) -> dict[str, Any]:
        """The keyword arguments of the decision, besides ``by``."""
        return self.cleaned_data


@dataclass(frozen=True, kw_only=True)
class Action:
    """Something that a person may decide about a row."""

    name: str
    #: The name of the action, its button and its page.
    title: Any
    #: Its effect. The page shows it above the form.
    consequence: Any
    #: A permission as Django's admin names it: ``resolve`` stands for the method ``has_resolve_permission``.
    permission: str
    form: type[ReasonForm]
    #: Called with the row as it was seen, the arguments from the form, and ``by``, the user. The page shows its error.
    decide: Callable[..., None]
    #: The action is offered for rows in these statuses.
    statuses: frozenset[str]
    #: Says why a row in one of these statuses can't be decided, or returns None.
    problem_of: Callable[[Any], Any] = lambda row: None
    #: Whether the action takes one row at a time, because the person enters a fact about one row.
    single: bool = False
    #: Whether an operation can take effect twice if the person is wrong. Then its button is red.
    is_dangerous: bool = False

    def obstacle(self, row: Any) -> Any:
        """Why this can't be decided about a row, which is annotated with ``database_time``; None if it can."""
        return self.problem_of(row) if row.status in self.statuses else _("Its state leaves nothing to decide here.")

    def as_admin_action(self) -> Callable[..., HttpResponse | None]:
        def respond(shown: DecisionAdmin, request: HttpRequest, selected: QuerySet[Any]) -> HttpResponse | None:
            return DecisionPage(shown, request, self).respond(selected)

        respond.__name__ = self.name
        return admin.action(description=self.title, permissions=[self.permission])(respond)


class DecisionAdmin(ReadOnlyAdmin):
    """An admin whose rows can't be edited. People make decisions about them instead.

    The page of a row consists of read-only fields, because a theme of the admin may replace the template of the page,
    and shows the fields.
    """

    decisions: ClassVar[tuple[Action, ...]]
    #: The field that counts the attempts.
    attempt_column: ClassVar[str]
    #: The fields at the top of a row's page.
    page_fields: ClassVar[tuple[str, ...]] = ("subject", "situation")
    #: The columns that only some people may see. They may be long, so they are loaded only where they are shown.
    hidden_columns: ClassVar[tuple[str, ...]]
    #: What a URL may filter on. By default it is any column. With response_body__startswith or payload__contains, a
    #: person without the permission could guess a hidden text letter by letter.
    allowed_lookups: ClassVar[frozenset[str]]

    @abstractmethod
    def database(self) -> str:
        """The database that rows are written to. A replica may show a renewed lease as over, or a sent message as
        waiting."""

    @abstractmethod
    def decision_columns(self, request: HttpRequest) -> tuple[str, ...]:
        """The columns of the confirmation page, as in ``list_display``, as far as the person may see them."""

    @abstractmethod
    def page_columns(self, request: HttpRequest) -> tuple[str, ...]:
        """The columns of a row's page, as far as the person may see them. Those without a value are left out."""

    @abstractmethod
    def explain(self, row: Any) -> SafeString:
        """The meaning of the row's state and the next step, as paragraphs of HTML."""

    @abstractmethod
    def state(self, row: Any) -> Any:
        """The row's state at a glance: a badge."""

    @abstractmethod
    def details(self, row: Any) -> list[str]:
        """The attempts, the lease and other details of the state."""

    @abstractmethod
    def subject(self, row: Any) -> Any:
        """The operation or topic, and the account."""

    @admin.display(description=_("last error"))
    def last_error(self, row: Any) -> str:
        return show_text(row.error)

    @admin.display(description=_("age"))
    def age(self, row: Any) -> str:
        return format_duration(-time_left(row, row.created_at))

    @admin.display(description=_("state"))
    def state_with_details(self, row: Any) -> Any:
        """State, attempt and lease in one column, because a screen has room for few columns."""
        return show_with_detail(self.state(row), *self.details(row))

    def cell(self, row: Any, name: str) -> Any:
        return getattr(self, name)(row) if hasattr(self, name) else getattr(row, name)

    def headings(self, names: Sequence[str]) -> list[str]:
        return [capfirst(str(label_for_field(name, self.opts.model, self))) for name in names]

    def offered(self, request: HttpRequest, row: Any) -> list[Action]:
        permitted = self.get_actions(request)
        return [action for action in self.decisions if action.name in permitted and action.obstacle(row) is None]

    @admin.display(description=_("state"))
    def situation(self, row: Any) -> SafeString:
        """The state, its meaning and the decisions that are offered. The page's form sends a decision to the list."""
        context = {
            "state": self.state_with_details(row),
            "explanation": self.explain(row),
            "offered": self.offered(row.request, row),
            "pk": row.pk,
            "list_url": url_of(self, "changelist"),
            "checkbox_name": ACTION_CHECKBOX_NAME,
        }
        return render_to_string("idempotency/situation.html", context)

    def get_object(self, request: HttpRequest, object_id: str, from_field: str | None = None) -> Any:
        row = super().get_object(request, object_id, from_field)
        if row is not None:
            row.request = request  # some fields of the page depend on the person's permissions
        return row

    def get_fieldsets(self, request: HttpRequest, obj: Any = None) -> Any:
        facts = [name for name in self.page_columns(request) if self.cell(obj, name) not in (None, "", NONE)]
        return [(None, {"fields": [*self.page_fields, *facts]})]

    def lookup_allowed(self, lookup: str, value: Any, request: HttpRequest) -> bool:
        return lookup in self.allowed_lookups

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        rows: QuerySet[Any] = super().get_queryset(request).using(self.database()).annotate(database_time=Now())
        return rows.defer(*self.hidden_columns)

    def response_action(
        self, request: HttpRequest, queryset: QuerySet[Any], *args: Any, **kwargs: Any
    ) -> HttpResponse | None:
        for pk in request.POST.getlist(ACTION_CHECKBOX_NAME):
            parse_number(pk)  # Django would pass any text on to the database
        return super().response_action(request, queryset, *args, **kwargs)


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
        pk, _separator, rest = token.partition(":")
        attempt, _separator, status = rest.partition(":")
        if status not in statuses:
            raise BadRequest("The form names a state that this action does not take.")
        return cls(parse_number(pk), parse_number(attempt), status)


def admin_of(site: admin.AdminSite, model: type[Model]) -> DecisionAdmin | None:
    """The package's admin of a model, unless this site has none or the project has replaced it by another one."""
    model_admin: Any = site.get_model_admin(model) if site.is_registered(model) else None
    return model_admin if isinstance(model_admin, DecisionAdmin) else None


def parse_number(text: str) -> int:
    """:raises BadRequest: the text is no number that a column of ids can hold."""
    if text.isascii() and text.isdecimal() and len(text) < 20 and int(text) <= BigIntegerField.MAX_BIGINT:
        return int(text)
    raise BadRequest("The form does not name a row by its number.")


class DecisionPage:
    """One request of an action: it shows the confirmation page, or carries out the decision."""

    def __init__(self, shown: DecisionAdmin, request: HttpRequest, action: Action) -> None:
        self.shown = shown
        self.opts: Final = shown.opts
        self.request = request
        self.action = action

    def respond(self, selected: QuerySet[Any]) -> HttpResponse | None:
        """:returns: a response, or None to show the list again."""
        if "decided" not in self.request.POST:
            return self._ask_first(selected)
        # The rows come from the page's own fields and not from the selection. Django filters the selection again, so a
        # row that another person resolved meanwhile may be missing from it, and the page has to name it.
        seen = [Seen.parse(token, self.action.statuses) for token in self.request.POST.getlist("seen")][:MAX_DECIDED]
        rows = self._find(seen)
        form = self.action.form(self.request.POST, rows=list(rows.values()))
        if not form.is_valid():
            return self._ask(list(rows.values()), form)
        decided = sum(self._decide(state, rows.get(state.pk), form) for state in seen)
        if decided:
            said = {"action": self.action.title, "count": decided, "items": model_ngettext(self.opts, decided)}
            self._say(gettext("%(action)s: %(count)d %(items)s.") % said, messages.SUCCESS)
        return HttpResponseRedirect(self._origin(list(rows))) if self._came_from_page and rows else None

    def _ask_first(self, selected: QuerySet[Any]) -> HttpResponse | None:
        rows = list(selected[: MAX_DECIDED + 1])
        limit = 1 if self.action.single else MAX_DECIDED
        if len(rows) > limit:
            said = {"action": self.action.title, "limit": limit}
            self._say(gettext("%(action)s: select up to %(limit)d at a time.") % said, messages.ERROR)
            return None
        obstacles = [(row, self.action.obstacle(row)) for row in rows]
        left_out = [(row, obstacle) for row, obstacle in obstacles if obstacle is not None]
        if rows and len(left_out) == len(rows):
            said = {"action": self.action.title, "reasons": " ".join(dict.fromkeys(str(why) for _row, why in left_out))}
            text = gettext("%(action)s: nothing that you selected can be decided. %(reasons)s")
            self._say(text % said, messages.ERROR)
            return None
        free = [row for row, obstacle in obstacles if obstacle is None]
        return self._ask(free, self.action.form(rows=free), left_out)

    def _find(self, seen: list[Seen]) -> dict[int, Any]:
        """Read the rows as they are now, but set attempt and status to what the person saw."""
        rows: dict[int, Any] = self.shown.get_queryset(self.request).in_bulk([state.pk for state in seen])
        for state in seen:
            if state.pk in rows:
                setattr(rows[state.pk], self.shown.attempt_column, state.attempt)
                rows[state.pk].status = state.status
        return rows

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

    def _ask(self, rows: list[Any], form: ReasonForm, left_out: Sequence[tuple[Any, Any]] = ()) -> HttpResponse:
        columns = self.shown.decision_columns(self.request)
        headings = self.shown.headings(columns)

        def cells(row: Any) -> list[tuple[str, Any]]:
            return [(heading, self.shown.cell(row, name)) for heading, name in zip(headings, columns, strict=True)]

        context = {
            **self.shown.admin_site.each_context(self.request),
            "opts": self.opts,
            "media": self.shown.media,
            "checkbox_name": ACTION_CHECKBOX_NAME,
            "title": self.action.title,
            "action": self.action,
            "headings": headings,
            "rows": [cells(row) for row in rows],
            "left_out": [(cells(row), why) for row, why in left_out],
            "seen": [Seen(row.pk, getattr(row, self.shown.attempt_column), row.status) for row in rows],
            "form": form,
            "came_from": "page" if self._came_from_page else "",
            "back": self._origin([row.pk for row in rows]),
        }
        return TemplateResponse(self.request, "idempotency/decide.html", context)

    @property
    def _came_from_page(self) -> bool:
        """Whether the person pressed a button on a row's own page. Otherwise they chose an action in the list."""
        return self.request.POST.get("came_from") == "page"

    def _origin(self, pks: list[int]) -> str:
        """Where the person came from: the row's own page, or the list with its filters."""
        if self._came_from_page and pks:
            return url_of(self.shown, "change", pks[0])
        return self.request.get_full_path()
