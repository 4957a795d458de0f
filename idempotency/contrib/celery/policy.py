"""The declaration of an idempotent task, and its lookup from Celery's task object."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from celery import current_app

from ... import foreign
from ...operation import Operation

#: The attribute of a task's function that holds the policy. ``functools.wraps`` copies it, for example in Celery's
#: autoretry.
ATTRIBUTE = "__idempotent_task__"

_POSITIONAL = {inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD}


@dataclass(frozen=True, eq=False)
class TaskPolicy:
    operation: Operation
    function: Callable[..., Any]
    #: The account under which messages are claimed, instead of the producer's.
    consumer: str | None
    #: The name of the queue for dead letters.
    dead_letter: str | None
    #: How many runs of a message may be cut off before it is dead-lettered.
    max_attempts: int

    @cached_property
    def _signatures(self) -> tuple[inspect.Signature, inspect.Signature]:
        """The function's signature, and the same without the parameter for the task."""
        whole = inspect.signature(self.function)
        parameters = list(whole.parameters.values())
        if parameters and parameters[0].kind in _POSITIONAL:
            del parameters[0]
        return whole, whole.replace(parameters=parameters)

    def arguments(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, bound: bool) -> dict[str, Any]:
        """The arguments of a call by name, so that positional and keyword arguments have the same fingerprint.

        Without defaults, so that a message keeps its fingerprint when the function gains a parameter.

        :param bound: whether the first positional argument is the task itself.
        :raises TypeError: the function doesn't take these arguments.
        """
        return dict(self._signatures[bound].bind(*args[bound:], **kwargs).arguments)


def policy_of(task: Any) -> TaskPolicy | None:
    """The policy of a Celery task, or None if the task is not idempotent."""
    policy: TaskPolicy | None = getattr(getattr(task, "run", None), ATTRIBUTE, None)
    return policy


def import_tasks() -> None:
    """Import the task modules of the project's Celery app, as its workers do.

    Skipped in a worker, which has already imported them: a second import would reset its logging.
    """
    if not foreign.is_worker(current_app):
        foreign.import_tasks_of(current_app)()


def idempotent_tasks(app: Any) -> Iterator[tuple[Any, TaskPolicy]]:
    for _, task in sorted(app.tasks.items()):
        policy = policy_of(task)
        if policy is not None:
            yield task, policy
