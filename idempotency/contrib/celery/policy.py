"""What ``@idempotent_task`` was told about a task, and how to find it from Celery's side."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from celery import current_app

from ...operation import Operation

#: Under this name a task's function bears its policy. Decorators that use ``functools.wraps``, as Celery's autoretry
#: does, pass it on.
ATTRIBUTE = "__idempotent_task__"

_POSITIONAL = {inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD}


@dataclass(frozen=True, eq=False)
class TaskPolicy:
    """The declaration of one idempotent task."""

    operation: Operation
    function: Callable[..., Any]
    #: A name to claim messages under, in place of the producer's account.
    consumer: str | None
    #: The name of the queue for dead letters.
    dead_letter: str | None
    #: How many runs of a message may be cut off before it is a poison message and is dead-lettered.
    max_attempts: int

    @cached_property
    def _signatures(self) -> tuple[inspect.Signature, inspect.Signature]:
        """Of the function as a message calls it: of one that gets no task, and of one that gets its task first."""
        whole = inspect.signature(self.function)
        parameters = list(whole.parameters.values())
        if parameters and parameters[0].kind in _POSITIONAL:
            del parameters[0]
        return whole, whole.replace(parameters=parameters)

    def arguments(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, bound: bool) -> dict[str, Any]:
        """The arguments of a call by the names of their parameters, so that both ways to give one are the same.

        Defaults are left out: a message that was published before a parameter was added is the same message after.

        :param bound: whether the first of them is the task itself.
        :raises TypeError: the function doesn't take them.
        """
        signature = self._signatures[bound]
        return dict(signature.bind(*args[bound:], **kwargs).arguments)


def policy_of(task: Any) -> TaskPolicy | None:
    """The policy of a Celery task, or None if it is not an idempotent one."""
    policy: TaskPolicy | None = getattr(getattr(task, "run", None), ATTRIBUTE, None)
    return policy


def consumers() -> set[tuple[str, str]]:
    """The names under which tasks claim messages in place of their producers' accounts, each with its operation."""
    app = current_app._get_current_object()
    app.loader.import_default_modules()  # which a process that runs no worker has not done yet
    return {(policy.consumer, policy.operation.name) for _, policy in idempotent_tasks(app) if policy.consumer}


def idempotent_tasks(app: Any) -> Iterator[tuple[Any, TaskPolicy]]:
    """The idempotent tasks that a Celery app knows, by name."""
    for _, task in sorted(app.tasks.items()):
        policy = policy_of(task)
        if policy is not None:
            yield task, policy
