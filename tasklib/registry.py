"""Maps names to task functions. A stored task finds its function only here: no import path is read from a row."""

from __future__ import annotations

import atexit
import importlib
import inspect
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasklib.errors import InvalidTaskDefinition, TaskNotRegistered

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from tasklib.task import TaskFunction


class Registry:
    """The task functions of one application, by name."""

    def __init__(self) -> None:
        self._functions: dict[str, TaskFunction[..., Any]] = {}
        self.revision = 0  # grows with each change

    def add(self, function: TaskFunction[..., Any]) -> None:
        known = self._functions.get(function.name)
        if known is not None and not _is_redefinition(known, function):
            raise InvalidTaskDefinition(_defined_twice(known, function))
        self._functions[function.name] = function
        self.revision += 1

    def get(self, name: str) -> TaskFunction[..., Any]:
        try:
            return self._functions[name]
        except KeyError:
            known = ", ".join(sorted(self._functions)) or "none: is the module that defines them imported?"
            raise TaskNotRegistered(f"no task function is called {name!r}. Registered: {known}") from None

    def __contains__(self, name: object) -> bool:
        return name in self._functions

    def __iter__(self) -> Iterator[TaskFunction[..., Any]]:
        return iter(list(self._functions.values()))  # another thread may register one meanwhile

    def clear(self) -> None:
        """Forget all functions, for tests that define their own."""
        self._functions.clear()
        self.revision += 1


def discover(modules: Iterable[str]) -> None:
    """Import the modules that define an application's tasks; also from the current directory, as `python -m` does."""
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    for module in modules:
        try:
            importlib.import_module(module)
        except ModuleNotFoundError as error:
            if not f"{module}.".startswith(f"{error.name}."):
                raise  # the module exists; something that it imports does not
            raise TaskNotRegistered(f"module {module!r} cannot be found from {Path.cwd()}") from None


def _defined_twice(known: TaskFunction[..., Any], new: TaskFunction[..., Any]) -> str:
    modules = {known.function.__module__, new.function.__module__}
    if "__main__" in modules and _file(known) == _file(new) != "":
        [imported] = modules - {"__main__"} or {"__main__"}
        return (
            f"task {new.name!r} is defined twice, since {_file(new)} is run as the main program and imported as "
            f"{imported!r} too. Put the tasks into a module of their own, which both the program and others import."
        )
    return (
        f"two functions are called {new.name!r}: {_place(known)} and {_place(new)}. "
        f'Rename one, or give it a name of its own with @task(name="...").'
    )


def _file(task: TaskFunction[..., Any]) -> str:
    code = getattr(task.function, "__code__", None)
    return "" if code is None else str(code.co_filename)


def _place(task: TaskFunction[..., Any]) -> str:
    function = task.function
    return f"{function.__module__}.{getattr(function, '__qualname__', repr(function))}"


def _is_redefinition(known: TaskFunction[..., Any], new: TaskFunction[..., Any]) -> bool:
    """Whether the new function may replace the known one. Both have the same name and module, and the module was loaded
    again, or the code is from the same line or from another file, as that of an edited notebook cell. Two definitions
    in one file are a mistake.
    """
    if _place(known) != _place(new):
        return False
    old, changed = (
        inspect.unwrap(task.function) for task in (known, new)
    )  # a decorator's wrapper has the same code for all functions
    old_code, new_code = getattr(old, "__code__", None), getattr(changed, "__code__", None)
    if old_code is None or new_code is None:
        return False
    is_same_namespace = getattr(old, "__globals__", None) is getattr(changed, "__globals__", None)
    is_loaded_again = known.module_spec is not new.module_spec or not is_same_namespace
    is_same_line = old_code.co_firstlineno == new_code.co_firstlineno
    return is_loaded_again or is_same_line or old_code.co_filename != new_code.co_filename


default_registry = Registry()
# Schemas must not outlive pydantic's own types: with Python's debug allocator the process crashed at its exit.
atexit.register(default_registry.clear)
