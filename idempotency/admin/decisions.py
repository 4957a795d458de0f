"""Decisions in the admin: actions, their confirmation page, and the buttons that lead to it.

A decision applies only to the state that the confirmation page showed. A row that has changed since is left unchanged
and reported.
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
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.template.loader import render_to_string
from django.template.response import TemplateResponse
from django.utils.safestring import SafeString
from django.utils.text import capfirst
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from ..exceptions import IdempotencyError
from ..models import Now
from .display import NONE, ReadOnlyAdmin, format_duration, show_text, show_with_detail, time_left, url_of

#: The maximum number of rows on one page, so that an operator can review them. To decide about more rows, call the
#: actions' functions in a script.
MAX_DECIDED = 100


class ReasonForm(forms.Form):
    reason: forms.CharField = forms.CharField(
        label=_("Reason"),
        max_length=500,
        help_text=_("How you know. The reason is kept in the history and the log."),
        widget=AdminTextInputWidget,
    )

    def arguments(self) -> dict[str, Any]:
        """The keyword arguments of the decision, besides ``by``."""
        return self.cleaned_data


@dataclass(frozen=True, kw_only=True)
class Action:
    """A kind of decision about rows."""

    name: str
    title: Any
    #: Its effect, shown above the form. May be ``ngettext_lazy`` of "count", the number of rows.
    consequence: Any
    #: In the notation of Django's admin: ``resolve`` stands for the method ``has_resolve_permission``.
    permission: str
    form: type[ReasonForm]
    #: Called with the row as it was shown, the form's arguments, and ``by``, the user. The page shows its error.
    decide: Callable[..., None]
    #: Offered for rows in these statuses.
    statuses: frozenset[str]
    #: Returns the reason why the action can't be taken on a row in one of these statuses, or None.
    problem_of: Callable[[Any], Any] = lambda row: None
    #: Whether it accepts only one row at a time.
    single: bool = False
    #: Whether a wrong decision can make an operation take effect twice. If so, its button is red.
    is_dangerous: bool = False

    def obstacle(self, row: Any) -> Any:
        """The reason why the action can't be taken on a row, or None. The row is annotated with ``database_time``."""
        return self.problem_of(row) if row.status in self.statuses else _("Its state does not allow this action.")

    def as_admin_action(self) -> Callable[..., HttpResponse | None]:
        def respond(shown: DecisionAdmin, request: HttpRequest, selected: QuerySet[Any]) -> HttpResponse | None:
            return DecisionPage(shown, request, self).respond(selected)

        respond.__name__ = self.name
        return admin.action(description=self.title, permissions=[self.permission])(respond)


class DecisionAdmin(ReadOnlyAdmin):
    """An admin of rows that can't be edited, only resolved by decisions.

    Everything on a row's page is a read-only field, because a theme may replace the page's template.
    """

    decisions: ClassVar[tuple[Action, ...]]
    #: The field that counts the attempts.
    attempt_column: ClassVar[str]
    #: The fields at the top of a row's page.
    page_fields: ClassVar[tuple[str, ...]] = ("subject", "situation")
    #: Columns that need a permission. They may be long, so they are loaded only where they are shown.
    hidden_columns: ClassVar[tuple[str, ...]]
    #: Lookups allowed in a URL. With response_body__startswith, hidden text could be guessed character by character.
    allowed_lookups: ClassVar[frozenset[str]]

    @abstractmethod
    def database(self) -> str:
        """The database that rows are written to, because a replica may show an outdated lease."""

    @abstractmethod
    def decision_columns(self, request: HttpRequest) -> tuple[str, ...]:
        """The permitted columns of the confirmation page, as in ``list_display``."""

    @abstractmethod
    def page_columns(self, request: HttpRequest) -> tuple[str, ...]:
        """The permitted columns of a row's page. Empty ones are left out."""

    @abstractmethod
    def explain(self, row: Any) -> SafeString:
        """The meaning of the row's state and the next step, as HTML paragraphs."""

    @abstractmethod
    def state(self, row: Any) -> Any:
        """The state, as a badge."""

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
        """State, attempt and lease in one column, to fit narrow screens."""
        return show_with_detail(self.state(row), *self.details(row))

    def advice(self, request: HttpRequest, action: Action, rows: Sequence[Any]) -> SafeString:
        """HTML between the rows of a confirmation page and its form."""
        return SafeString("")

    def cell(self, row: Any, name: str) -> Any:
        return getattr(self, name)(row) if hasattr(self, name) else getattr(row, name)

    def headings(self, names: Sequence[str]) -> list[str]:
        return [capfirst(str(label_for_field(name, self.opts.model, self))) for name in names]

    def offered(self, request: HttpRequest, row: Any) -> list[Action]:
        permitted = self.get_actions(request)
        return [action for action in self.decisions if action.name in permitted and action.obstacle(row) is None]

    @admin.display(description=_("state"))
    def situation(self, row: Any) -> SafeString:
        """The state, its meaning and the available decisions, which the page's form sends to the list."""
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
            row.request = request  # some fields depend on the user's permissions
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
            parse_number(pk)  # because Django would pass any text to the database
        return super().response_action(request, queryset, *args, **kwargs)


@dataclass(frozen=True)
class Seen:
    """The state of a row on the confirmation page. The decision applies to no later state."""

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
            raise BadRequest("The form contains a state that this action does not accept.")
        return cls(parse_number(pk), parse_number(attempt), status)


def admin_of(site: admin.AdminSite, model: type[Model]) -> DecisionAdmin | None:
    """This package's admin of a model, or None if the site has no admin or a different one for it."""
    model_admin: Any = site.get_model_admin(model) if site.is_registered(model) else None
    return model_admin if isinstance(model_admin, DecisionAdmin) else None


def parse_number(text: str) -> int:
    """:raises BadRequest: the text is not a valid id."""
    if text.isascii() and text.isdecimal() and len(text) < 20 and int(text) <= BigIntegerField.MAX_BIGINT:
        return int(text)
    raise BadRequest("The form contains an invalid id.")


class DecisionPage:
    """One request of an action. Shows the confirmation page, or carries out the decision."""

    def __init__(self, shown: DecisionAdmin, request: HttpRequest, action: Action) -> None:
        self.shown = shown
        self.opts: Final = shown.opts
        self.request = request
        self.action = action

    def respond(self, selected: QuerySet[Any]) -> HttpResponse | None:
        """:returns: a response, or None to show the list again."""
        if "decided" not in self.request.POST:
            return self._confirm_selection(selected)
        # Take the rows from the page's fields. Django filters the selection again, so it may lack a row that another
        # operator resolved in the meantime, which the page must report.
        seen = [Seen.parse(token, self.action.statuses) for token in self.request.POST.getlist("seen")][:MAX_DECIDED]
        rows = self._find(seen)
        form = self.action.form(self.request.POST)
        if not form.is_valid():
            return self._confirm(list(rows.values()), form)
        decided = sum(self._decide(state, rows.get(state.pk), form) for state in seen)
        if decided:
            values = {"action": self.action.title, "count": decided, "items": model_ngettext(self.opts, decided)}
            self._report(gettext("%(action)s: %(count)d %(items)s.") % values, messages.SUCCESS)
        return HttpResponseRedirect(self._origin(list(rows))) if self._came_from_page and rows else None

    def _confirm_selection(self, selected: QuerySet[Any]) -> HttpResponse | None:
        rows = list(selected[: MAX_DECIDED + 1])
        limit = 1 if self.action.single else MAX_DECIDED
        if len(rows) > limit:
            values = {"action": self.action.title, "limit": limit}
            self._report(gettext("%(action)s: select up to %(limit)d at a time.") % values)
            return None
        obstacles = [(row, self.action.obstacle(row)) for row in rows]
        left_out = [(row, obstacle) for row, obstacle in obstacles if obstacle is not None]
        if rows and len(left_out) == len(rows):
            reasons = " ".join(dict.fromkeys(str(why) for _row, why in left_out))
            text = gettext("%(action)s: not possible for any selected row. %(reasons)s")
            self._report(text % {"action": self.action.title, "reasons": reasons})
            return None
        free = [row for row, obstacle in obstacles if obstacle is None]
        return self._confirm(free, self.action.form(), left_out)

    def _find(self, seen: list[Seen]) -> dict[int, Any]:
        """Read the current rows, but set attempt and status to the values that the page showed."""
        rows: dict[int, Any] = self.shown.get_queryset(self.request).in_bulk([state.pk for state in seen])
        for state in seen:
            if state.pk in rows:
                setattr(rows[state.pk], self.shown.attempt_column, state.attempt)
                rows[state.pk].status = state.status
        return rows

    def _decide(self, seen: Seen, row: Any, form: ReasonForm) -> bool:
        if row is None:
            values = {"name": capfirst(self.opts.verbose_name), "pk": seen.pk}
            self._report(gettext("%(name)s %(pk)d has been purged.") % values)
            return False
        try:
            self.action.decide(row, by=self.request.user, **form.arguments())
        except (IdempotencyError, ImproperlyConfigured, ValueError) as error:
            self._report(str(error))
            return False
        return True

    def _report(self, message: str, level: int = messages.ERROR) -> None:
        self.shown.message_user(self.request, message, level)

    def _confirm(self, rows: list[Any], form: ReasonForm, left_out: Sequence[tuple[Any, Any]] = ()) -> HttpResponse:
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
            "consequence": self.action.consequence % {"count": len(rows)},
            "advice": self.shown.advice(self.request, self.action, rows),
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
        """Whether the action was started by a button on a row's page instead of in the list."""
        return self.request.POST.get("came_from") == "page"

    def _origin(self, pks: list[int]) -> str:
        """The page that the action was started from: the row's page, or the list with its filters."""
        if self._came_from_page and pks:
            return url_of(self.shown, "change", pks[0])
        return self.request.get_full_path()
