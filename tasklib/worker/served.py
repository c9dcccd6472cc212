"""What a worker serves: its queues, and the task functions that it can run."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, NamedTuple

from tasklib.options import DEFAULT_QUEUE
from tasklib.policies.queue_policy import Policies
from tasklib.worker.execution import Execution

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence

    from tasklib.registry import Registry
    from tasklib.statements import ClaimedTask
    from tasklib.task import TaskFunction

MOST_LIKELY_QUEUES = 10  # each has a claim of its own at every look; all other queues share one


class Reading(NamedTuple):
    """The names and queues of the functions in a registry, read at one revision of it."""

    revision: int
    names: list[str]
    likely_queues: list[str]


class Served:
    """Queues (None: all) and task functions (None: all that are registered). Used by several threads."""

    def __init__(self, registry: Registry, queues: Sequence[str] | None, names: Iterable[str] | None) -> None:
        self._registry = registry
        self.queues = None if queues is None else list(dict.fromkeys(queues))
        self._names = None if names is None else sorted(set(names))
        self._found: list[str] = []
        self.policies = Policies()
        self._is_coroutine: dict[TaskFunction[..., Any], bool] = {}
        self._reading: Reading | None = None

    def names(self) -> list[str]:
        return self._read().names if self._names is None else self._names

    def likely_queues(self) -> list[str]:
        """The queues that are claimed from one by one: the given ones, or those of the functions, and those in which a
        shared claim found many tasks. There is always at least one: a worker without functions still promotes tasks,
        and only a claim tells it when the next task is due. There are only a few: users choose how many queues exist.
        """
        return self._read().likely_queues

    @property
    def serves_others(self) -> bool:
        """It serves queues that are not among the likely ones."""
        return self.queues is None or len(self.queues) > len(self.likely_queues())

    def add_likely(self, queue: str) -> None:
        """This queue gets a claim of its own from now on."""
        if queue not in self.likely_queues():
            self._found = [queue, *self._found][:MOST_LIKELY_QUEUES]
            self._reading = None

    def set_policies(self, policies: Policies) -> None:
        """Queues whose policy asks for it are claimed from one by one."""
        self.policies = policies
        self._reading = None

    def _with_own_claim(self) -> list[str]:
        return [
            name for name, policy in self.policies.queues.items()
            if policy.needs_own_claim and (self.queues is None or name in self.queues)
        ]  # fmt: skip

    def _read(self) -> Reading:
        """The last reading while the registry is unchanged. It is replaced as a whole, because several threads ask."""
        reading, revision = self._reading, self._registry.revision
        if reading is None or reading.revision != revision:
            registered = sorted(each.name for each in self._registry)
            names = set(self._names if self._names is not None else registered)
            own = (each.task_options.queue for each in self._registry if each.name in names)
            declared = list(dict.fromkeys(self.queues if self.queues is not None else own)) or [DEFAULT_QUEUE]
            if len(declared) > MOST_LIKELY_QUEUES:
                declared = [DEFAULT_QUEUE] if DEFAULT_QUEUE in declared else declared[:1]
            reading = Reading(
                revision, registered, list(dict.fromkeys([*declared, *self._found, *self._with_own_claim()]))
            )
            self._reading = reading
        return reading

    def executions(self, tasks: Collection[ClaimedTask]) -> list[Execution]:
        kinds = {name: self._kind(name) for name in {each.held.name for each in tasks}}
        return [Execution(each, *kinds[each.held.name]) for each in tasks]

    def _kind(self, name: str) -> tuple[TaskFunction[..., Any] | None, bool]:
        """The function, and whether it runs on the tasks' event loop."""
        if name not in self._registry:
            return None, False
        function = self._registry.get(name)
        if function not in self._is_coroutine:
            # A task with a process of its own is attended to by a thread, even if its function is async.
            is_isolated = function.task_options.isolation == "process"
            self._is_coroutine[function] = not is_isolated and is_async(function.function)
        return function, self._is_coroutine[function]

    def functions(self) -> list[TaskFunction[..., Any]]:
        names = set(self.names())
        return [each for each in self._registry if each.name in names]

    def isolated(self) -> list[TaskFunction[..., Any]]:
        """The functions whose tasks run in processes of their own."""
        return [each for each in self.functions() if each.task_options.isolation == "process"]


def is_async(function: Callable[..., object]) -> bool:
    """Also true of an object whose `__call__` is async."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004
