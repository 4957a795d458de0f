"""The actions that a person may take on records and messages."""

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
        "You know that these operations did not take effect, and that no late call can still arrive. The next retry of "
        "each operation runs it. If you are wrong, the operation takes effect twice."
    ),
    permission="resolve",
    form=ReasonForm,
    decide=resolutions.mark_not_executed,
    statuses=_PARKED,
)
RECORD_OUTCOME = Action(
    name="record_outcome",
    title=_("Record an outcome"),
    consequence=_(
        "You know that this operation took effect, and how it ended. Every retry gets the response that you enter "
        "here, as if the operation had sent it. The operation does not run again under this key."
    ),
    permission="resolve",
    form=OutcomeForm,
    decide=resolutions.record_outcome,
    statuses=_PARKED,
    single=True,
)
RELEASE = Action(
    name="release",
    title=_("Release"),
    consequence=_(
        "The next retry of each of these operations runs it at once, whatever recovery it declares. If an operation "
        "has taken effect or still will, and is not safe to run again, it takes effect twice."
    ),
    permission="release",
    form=ReleaseForm,
    decide=resolutions.release,
    statuses=frozenset({Status.PARKED.value, Status.IN_PROGRESS.value}),
)
REQUEUE = Action(
    name="requeue",
    title=_("Requeue"),
    consequence=_(
        "These messages are tried again, as often as new ones. First correct what the error names. A broker may "
        "already have a message whose confirmation was lost. That message is then sent twice with the same id, and a "
        "consumer that claims it takes effect once."
    ),
    permission="requeue",
    form=ReasonForm,
    decide=requeue,
    statuses=frozenset({MessageStatus.DEAD.value}),
)
