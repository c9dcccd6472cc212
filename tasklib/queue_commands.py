"""The commands `tasklib queue` and `tasklib cluster`: policies, for operators. They change the whole cluster;
`tasklibd pause` is for the workers of one host.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from tasklib.command_line import Json, open_client, print_answer, read_moment_or_duration, read_pairs
from tasklib.errors import TasklibError

# As in tasklib/commands.py: help imports no database driver.
# ruff: noqa: PLC0415

if TYPE_CHECKING:
    from tasklib.queues import ClusterPolicy, Queue

queue_app = typer.Typer(
    name="queue",
    help="Show and change the policies of queues, for the whole cluster.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
cluster_app = typer.Typer(
    name="cluster", help="Show and change what holds for all queues.", no_args_is_help=True, rich_markup_mode=None
)

Name = Annotated[str, typer.Argument(metavar="QUEUE")]
Reason = Annotated[str | None, typer.Option(help="Kept in the audit.")]
Options = Annotated[
    list[str], typer.Argument(metavar="OPTION=VALUE...", help="For example max_running=10; none removes a limit.")
]


@queue_app.command("list")
def list_(as_json: Json = False) -> None:
    """List every queue that has a policy, and every queue in which a task is ready."""
    from tasklib import printing

    with open_client() as client:
        queues = client.list_queues()
    if as_json:
        typer.echo(printing.as_json([queue.to_dict() for queue in queues]))
    else:
        printing.print_queues(queues)


@queue_app.command()
def show(name: Name, as_json: Json = False) -> None:
    """Show the policy of one queue, and what is in force now."""
    with open_client() as client:
        queue = client.get_queue(name)
    if queue is None:
        raise TasklibError(f"nobody has set a policy for queue {name}")
    _print(queue, as_json=as_json)


@queue_app.command("set")
def set_(name: Name, options: Options, reason: Reason = None, as_json: Json = False) -> None:
    """Change the policy of one queue: what is not named stays as it is.

    Options: max_running, max_per_worker, rate_limit, rate_seconds, rate_burst, breaker_failures, breaker_share,
    breaker_window_seconds, breaker_open_seconds, breaker_probes, breaker_codes (with commas), ageing_seconds, rank,
    weight, default_priority, default_max_retries, default_timeout_seconds, retention_days, audit.
    """
    from tasklib.queue_options import read_queue_options

    changes = read_queue_options(read_pairs(options))
    with open_client() as client:
        queue = client.set_queue(name, reason=reason, **changes)
    _print(queue, as_json=as_json)


@queue_app.command()
def pause(
    name: Name,
    reason: Reason = None,
    until: Annotated[
        str | None, typer.Option(help="When it ends by itself: a duration such as 30m, or a moment with its time zone.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Start no task of this queue in the whole cluster. Tasks that execute go on.

    `tasklibd pause` is another command: it pauses all queues, for the workers of this host alone.
    """
    end = read_moment_or_duration(until)
    with open_client() as client:
        queue = client.pause_queue(name, reason, end)
    if as_json:
        _print(queue, as_json=True)
    else:
        typer.echo("paused" if queue.paused_until is None else f"paused until {queue.paused_until.isoformat(sep=' ')}")


@queue_app.command()
def resume(name: Name, reason: Reason = None) -> None:
    """End the pause of this queue."""
    with open_client() as client:
        is_done = client.resume_queue(name, reason)
    print_answer("resumed" if is_done else None, f"queue {name} is not paused")


@cluster_app.command("show")
def show_cluster(as_json: Json = False) -> None:
    """Show what holds for all queues."""
    with open_client() as client:
        cluster = client.get_cluster()
    _print(cluster, as_json=as_json)


@cluster_app.command("set")
def set_cluster(options: Options, reason: Reason = None, as_json: Json = False) -> None:
    """Change what holds for all queues: cluster_wide_cap, refuses_unknown_queues."""
    from tasklib.queue_options import read_cluster_options

    changes = read_cluster_options(read_pairs(options))
    with open_client() as client:
        cluster = client.set_cluster(reason=reason, **changes)
    _print(cluster, as_json=as_json)


def _print(shown: Queue | ClusterPolicy, *, as_json: bool) -> None:
    from tasklib import printing

    if as_json:
        typer.echo(printing.as_json(shown.to_dict()))
    else:
        printing.print_values(shown.to_dict(), width=24)
