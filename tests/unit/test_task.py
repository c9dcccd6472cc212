"""The decorator: bare or with options, and the function stays what it was."""

from __future__ import annotations

import importlib
import inspect
import pickle
import sys
from typing import TYPE_CHECKING, Any

import pytest

import tasklib
from tasklib.registry import default_registry, discover

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@tasklib.task
def at_module_level() -> None: ...


def test_a_task_function_is_still_a_function() -> None:
    """Calling it runs it here and now, with its name, doc and signature."""

    @tasklib.task
    def double(number: int) -> int:
        """Twice the number."""
        return 2 * number

    assert double(4) == 8
    assert (double.__name__, double.__doc__) == ("double", "Twice the number.")
    assert list(inspect.signature(double).parameters) == ["number"]
    assert repr(double) == "<task function 'double'>"


async def test_an_async_function_is_still_one() -> None:
    """Awaiting it runs it here and now."""

    @tasklib.task(name="mail.send")
    async def send() -> str:
        return "sent"

    assert await send() == "sent"
    assert send.name == "mail.send"


def test_registered_tasks_are_listed_as_tuples() -> None:
    """`get_registered_tasks() -> dict[str, tuple]`."""

    @tasklib.task(max_retries=5, timeout_seconds=30, retry_on=[OSError], no_retry_on=KeyError)
    def send_email(to: str) -> None: ...

    registered = tasklib.get_registered_tasks()["send_email"]
    function, arguments, options = registered
    assert isinstance(registered, tuple)
    assert function is send_email.function
    assert arguments.encode((), {"to": "a"}).kwargs == '{"to":"a"}'
    assert (options.max_retries, options.timeout_seconds) == (5, 30)
    assert (options.retry_on, options.no_retry_on) == ((OSError,), (KeyError,))


def test_two_functions_with_one_name_are_refused() -> None:
    """A stored task would run whichever was imported last."""

    def make(suffix: str) -> Callable[[], None]:
        def same() -> None: ...

        same.__qualname__ = f"same_{suffix}"
        return same

    tasklib.task(make("a"))
    with pytest.raises(tasklib.InvalidTaskDefinition, match=r"two functions are called 'same'.*same_a.*same_b"):
        tasklib.task(make("b"))


def test_a_reloaded_module_replaces_its_functions() -> None:
    """Development servers import modules again; that is not a second definition."""
    source = "import tasklib\n@tasklib.task\ndef reloaded(): ...\n"
    code = compile(source, "app.py", "exec")
    exec(code, {"__name__": "app"})
    exec(code, {"__name__": "app"})
    assert "reloaded" in default_registry


def test_an_edited_module_that_is_reloaded_replaces_its_functions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever line they stand on now; and so does one that is imported once more."""
    path = tmp_path / "edited_app.py"
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # the second version may be as old and as long as the first
    path.write_text("import tasklib\n@tasklib.task\ndef edited(): return 1\n")
    module = importlib.import_module("edited_app")
    path.write_text("import tasklib\n# a line more\n@tasklib.task\ndef edited(): return 2\n")
    importlib.reload(module)
    assert default_registry.get("edited")() == 2
    monkeypatch.delitem(sys.modules, "edited_app")
    path.write_text("import tasklib\n# a line more\n# and another\n@tasklib.task\ndef edited(): return 3\n")
    importlib.import_module("edited_app")
    assert default_registry.get("edited")() == 3
    monkeypatch.delitem(sys.modules, "edited_app")


def test_an_edited_cell_of_a_notebook_replaces_its_functions() -> None:
    """Each version of a cell has a file name of its own, and all share one namespace."""
    notebook = {"__name__": "__main__"}
    for version in (1, 2):
        source = f"import tasklib\n{'# changed' * (version - 1)}\n\n@tasklib.task\ndef cell(): return {version}\n"
        exec(compile(source, f"ipykernel_1/{version}.py", "exec"), notebook)
    assert default_registry.get("cell")() == 2


@pytest.mark.parametrize("decorator", ["", "@plain\n"])
def test_a_name_that_is_used_twice_in_one_file_is_refused(decorator: str) -> None:
    """The second would replace the first in silence. A decorator of the file's own hides neither."""
    source = (
        "import functools, tasklib\ndef plain(f):\n    @functools.wraps(f)\n    def g(): return f()\n    return g\n"
        f"@tasklib.task\n{decorator}def twice(): ...\n@tasklib.task\n{decorator}def twice(): ...\n"
    )
    with pytest.raises(tasklib.InvalidTaskDefinition, match="two functions are called 'twice'"):
        exec(compile(source, "twice.py", "exec"), {"__name__": "twice"})


def test_an_argument_may_be_called_self() -> None:
    """Where a function takes any keyword."""

    @tasklib.task
    def takes(**given: int) -> dict[str, int]:
        return given

    assert takes(self=1) == {"self": 1}
    assert takes.new(self=1).kwargs == takes.options(queue="mail").new(self=1).kwargs == '{"self":1}'


@pytest.mark.parametrize("parameter", ["priority", "tags", "queue", "delay_seconds", "connection"])
def test_a_parameter_called_like_an_option_is_refused(parameter: str) -> None:
    """Its value would be taken for the option, in silence."""
    namespace: dict[str, Any] = {}
    exec(f"def wrong({parameter}): ...", namespace)
    with pytest.raises(tasklib.InvalidTaskDefinition, match=f"parameter {parameter} is called like an option"):
        tasklib.task(namespace["wrong"])


def test_a_method_is_refused() -> None:
    """A worker has no object to call it on; a static method is a function."""
    with pytest.raises(tasklib.InvalidTaskDefinition, match="static"):

        class Wrong:
            @tasklib.task
            def method(self, x: int) -> None: ...

    class Right:
        @staticmethod
        @tasklib.task
        def double(x: int) -> int:
            return 2 * x

    assert Right.double(2) == 4
    assert Right().double.new(2).kwargs == '{"x":2}'


def test_a_task_function_can_be_pickled() -> None:
    """As functions are, by its place: process pools need it."""
    assert pickle.loads(pickle.dumps(at_module_level)) is at_module_level


def test_the_functions_own_attributes_do_not_shadow_ours() -> None:
    """They stay on the function."""

    def function() -> None: ...

    function.submit = "mine"  # type: ignore[attr-defined]
    wrapped = tasklib.task(function)
    assert callable(wrapped.submit)
    assert wrapped.function.submit == "mine"  # type: ignore[attr-defined]


@pytest.mark.parametrize("wrong", ["mail.send", 5, int])
def test_what_cannot_be_a_task_is_refused(wrong: Any) -> None:
    """The habit of other libraries gets the right spelling."""
    with pytest.raises(tasklib.InvalidTaskDefinition):
        tasklib.task(wrong)


def test_a_parameter_may_be_called_func() -> None:
    """`func` is positional-only in submit_task."""

    @tasklib.task
    def apply(func: str) -> None: ...

    assert apply.new(func="x").kwargs == '{"func":"x"}'


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"max_retrys": 1}, "no option max_retrys"),
        ({"retry_on": ["OSError"]}, "exception classes"),
        ({"retry_on": "OSError"}, "got 'OSError'"),
        ({"no_retry_on": 5}, "exception classes"),
        ({"queue": None}, "queue=None"),
        ({"name": ""}, "task's name"),
        ({"name": 5}, "task's name"),
        ({"isolation": "thread"}, 'isolation must be "worker" or "process"'),
        ({"isolation": None}, "isolation must be"),
        ({"isolation": ["process"]}, "isolation must be"),
        ({"memory_limit_mb": 512}, 'memory_limit_mb needs isolation="process"'),
        ({"isolation": "process", "memory_limit_mb": 0}, "memory_limit_mb must be a whole number"),
        ({"isolation": "process", "memory_limit_mb": 1.5}, "memory_limit_mb must be a whole number"),
        ({"isolation": "process", "memory_limit_mb": True}, "memory_limit_mb must be a whole number"),
    ],
)
def test_a_wrong_decorator_option_is_named(options: dict[str, Any], said: str) -> None:
    """At import, where the mistake is."""
    with pytest.raises((tasklib.InvalidTaskDefinition, tasklib.InvalidOptions), match=said):
        tasklib.task(**options)(lambda: None)


def test_a_task_says_where_it_runs() -> None:
    """In its worker, unless it asks for a process of its own, with or without a limit to its memory."""

    @tasklib.task(isolation="process", memory_limit_mb=512)
    def resize() -> None: ...

    assert (resize.task_options.isolation, resize.task_options.memory_limit_mb) == ("process", 512)
    assert (at_module_level.task_options.isolation, at_module_level.task_options.memory_limit_mb) == ("worker", None)
    assert tasklib.task(name="alone", isolation="process")(lambda: None).task_options.memory_limit_mb is None


def test_a_lambda_needs_a_name() -> None:
    """`<lambda>` says nothing in a log."""
    with pytest.raises(tasklib.InvalidTaskDefinition, match=r"task\(name="):
        tasklib.task(lambda: None)
    assert tasklib.task(name="nothing")(lambda: None).name == "nothing"


def test_an_unknown_task_lists_the_known_ones() -> None:
    """The usual cause is a module that nobody imported."""

    @tasklib.task
    def known() -> None: ...

    with pytest.raises(tasklib.TaskNotRegistered, match=r"'unknown'.*known"):
        default_registry.get("unknown")


def test_discovery_says_which_module_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And lets errors inside the module through, also when the names are alike."""
    (tmp_path / "shop_app.py").write_text("import shop_ap")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ModuleNotFoundError, match="shop_ap'"):
        discover(["shop_app"])
    with pytest.raises(tasklib.TaskNotRegistered, match="'no_such_app'"):
        discover(["no_such_app"])
