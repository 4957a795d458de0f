"""The actions that a person may take on records and messages, and what each of them means."""

from __future__ import annotations

from django.utils.translation import gettext_lazy as _

from ..lifecycle import Status
from ..models import MessageStatus
from ..outbox.backlog import requeue
from ..upkeep import resolutions
from .decisions import Action
from .forms import OutcomeForm, ReasonForm, ReleaseForm

_PARKED = frozenset({Status.PARKED.value})

MARK_NOT_EXECUTED = Action(
    name="mark_not_executed",
    title=_("Mark as not executed"),
    consequence=_(
        "You know that these operations did not take effect, and that no late call will still arrive. The next retry "
        "of each runs it. If you are wrong, it takes effect twice."
    ),
    permission="resolve",
    form=ReasonForm,
    decide=lambda record, form, by: resolutions.mark_not_executed(record, by=by, reason=form.cleaned_data["reason"]),
    statuses=_PARKED,
)
RECORD_OUTCOME = Action(
    name="record_outcome",
    title=_("Record an outcome"),
    consequence=_(
        "You know that this operation took effect, and how it ended. Every retry is answered with what you enter here, "
        "as if the operation had answered so. It never runs again."
    ),
    permission="resolve",
    form=OutcomeForm,
    decide=lambda record, form, by: resolutions.record_outcome(
        record, form.response(), by=by, reason=form.cleaned_data["reason"]
    ),
    statuses=_PARKED,
    single=True,
)
RELEASE = Action(
    name="release",
    title=_("Release"),
    consequence=_(
        "The next retry of each of these operations runs it at once, whatever it declares about recovery. If one has "
        "taken effect or still will, and is not safe to run again, it takes effect twice."
    ),
    permission="release",
    form=ReleaseForm,
    decide=lambda record, form, by: resolutions.release(
        record, by=by, reason=form.cleaned_data["reason"], force=form.cleaned_data["force"]
    ),
    statuses=frozenset({Status.PARKED.value, Status.IN_PROGRESS.value}),
)
REQUEUE = Action(
    name="requeue",
    title=_("Requeue"),
    consequence=_(
        "These messages are tried again, as often as new ones. Repair first what is wrong: the error says what it was. "
        "A broker may have one of them already, if its confirmation was lost. It comes with the same id then, and a "
        "consumer that claims it takes effect once."
    ),
    permission="requeue",
    form=ReasonForm,
    decide=lambda message, form, by: requeue(message, by=by, reason=form.cleaned_data["reason"]),
    statuses=frozenset({MessageStatus.DEAD.value}),
)
