"""Short runs of the campaigns that `dev.py soak daemon` runs at length. The long runs judge figures, on a quiet
machine. These judge that no task is lost, executed twice, or charged for what it has not done.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SHORT_HOSTILE_TASKS = """
--rounds 1 --tasks 3 --pause-seconds 0.2 --lease-seconds 2 --bury-after 1 --load 0.2 --on-time-percent 50
"""


def run(scenario: str, options: str) -> str:
    """The output of a campaign that has found nothing wrong."""
    command = [sys.executable, "-W", "error", "-m", f"tests.campaigns.daemon_{scenario}", *options.split()]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=170)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


@pytest.mark.slow
@pytest.mark.direct
def test_no_task_is_charged_for_children_that_are_killed() -> None:
    """After kill -9 of random ones, what was executing runs again, and no attempt is charged."""
    said = run("kills", "--kills 10 --seconds-per-kill 1 --rate 10 --recovery-seconds 30")
    assert "all invariants hold" in said


@pytest.mark.slow
@pytest.mark.direct
def test_no_process_survives_a_supervisor_that_is_killed() -> None:
    """Not even one that has left its session. The other daemon takes over."""
    said = run("supervisors", "--kills 1 --lease-seconds 2 --recovery-seconds 30")
    assert "all invariants hold" in said


@pytest.mark.slow
@pytest.mark.direct
def test_a_daemon_that_was_frozen_changes_nothing_and_rejoins() -> None:
    """It is stopped past its lease; the other takes over, and its late writes are refused."""
    said = run("freeze", "--freezes 1 --lease-seconds 2 --recovery-seconds 30")
    assert "all invariants hold" in said


@pytest.mark.slow
@pytest.mark.direct
def test_hostile_tasks_end_and_harmless_ones_are_not_charged() -> None:
    """A task that crashes its worker is buried, one that never ends is timed out. A task that kills its supervisor
    leaves no process behind, and the next daemon goes on.
    """
    said = run("hostile_tasks", SHORT_HOSTILE_TASKS)
    assert "all bounds hold" in said


@pytest.mark.slow
@pytest.mark.direct
def test_rolling_restarts_lose_nothing_and_cost_no_attempt() -> None:
    """Every task that is submitted meanwhile is begun once."""
    said = run("rolling", "--restarts 2 --rate 10 --pause-seconds 0.1 --gap-seconds 10")
    assert "all invariants hold" in said


@pytest.mark.slow
@pytest.mark.direct
def test_an_outage_of_the_database_is_waited_for() -> None:
    """By the same processes; then work goes on, and outcomes that were reached meanwhile are written."""
    said = run("outage", "--seconds 7 --lease-seconds 4 --cpu-percent 30 --first-task-seconds 60")
    assert "all bounds hold" in said


@pytest.mark.slow
@pytest.mark.direct
def test_an_idle_daemon_is_small() -> None:
    """Under 250 MB of PSS. Its share of a processor is judged on a quiet machine."""
    said = run("idle", "--seconds 2 --settle-seconds 0 --cpu-percent 50")
    assert "all bounds hold" in said


@pytest.mark.slow
@pytest.mark.direct
def test_an_idle_daemon_starts_what_is_due() -> None:
    """Delayed tasks and retries start, and running tasks are visible. The long run judges how soon."""
    said = run("punctual", "--rounds 1 --late-seconds 20 --visible-seconds 20")
    assert "all bounds hold" in said


@pytest.mark.slow
@pytest.mark.direct
def test_counters_are_right_though_workers_are_killed() -> None:
    """Every kill is counted, and every attempt is counted once."""
    said = run("counters", "--kills 8 --tasks-per-kill 30")
    assert "all counters agree" in said


@pytest.mark.slow
@pytest.mark.direct
def test_bad_rows_do_not_stop_recovery() -> None:
    """Rows with extreme values are in every table, also among the tasks of killed workers. The others are completed."""
    said = run("bad_rows", "--kills 5 --seconds-per-kill 1 --rate 10 --share 0.1 --recovery-seconds 60")
    assert "all invariants hold" in said


@pytest.mark.slow
@pytest.mark.direct
def test_scrapes_are_answered_while_a_backlog_is_drained() -> None:
    """All of them. The long run judges what they cost."""
    said = run("scrapes", "--rounds 1 --tasks 2000 --least-share 0.2")
    assert "all bounds hold" in said


@pytest.mark.slow
@pytest.mark.direct
def test_no_value_of_a_scoreboard_is_read_half_written() -> None:
    """The supervisor judges workers by these values: a torn one would look like a hung worker."""
    said = run("torn_reads", "--seconds 2")
    assert "no value was read torn" in said


@pytest.mark.slow
@pytest.mark.direct
def test_no_task_is_charged_for_connections_that_others_use_up() -> None:
    """Tasks that write through their own connection wait for it, or are given back; each writes once."""
    said = run("connections", "--rounds 3 --rate 8 --longest-seconds 5")
    assert "all invariants hold" in said


@pytest.mark.slow
@pytest.mark.direct
def test_suspects_start_beside_any_load() -> None:
    """Workers are killed under a backlog, and beside long tasks. The long run judges how soon suspects start."""
    said = run("suspects", "--kills 1 --seconds-per-kill 0.2 --recovery-seconds 60 --crowded-seconds 60")
    assert said.count("all invariants hold") == 3


@pytest.mark.slow
@pytest.mark.direct
def test_tasks_end_after_a_failover_that_lost_their_ends() -> None:
    """Long before their locks have passed."""
    said = run("failover", "--rounds 1 --end-seconds 120")
    assert "all tasks have ended" in said


@pytest.mark.slow
@pytest.mark.direct
def test_locked_rows_hold_up_no_other_task() -> None:
    """Tasks lock their own rows, and users those of others: thirty other tasks end meanwhile, one after the other."""
    said = run("locks", "--seconds 2 --round-trips 30 --least-share 0")
    assert "all invariants hold" in said


@pytest.mark.slow
@pytest.mark.direct
def test_many_queues_names_and_large_arguments_are_served() -> None:
    """A small number of each. The long run judges the figures."""
    small = "--queues 300 --tasks 600 --large 4 --names 200 --round-trips 10"
    said = run("many_queues", f"{small} --least-share 0 --default-seconds 60 --more-seconds 10")
    assert "all bounds hold" in said


@pytest.mark.slow
@pytest.mark.direct
def test_policies_hold_though_workers_are_killed_and_policies_change() -> None:
    """By a journal outside the database: caps, rates, pauses and breakers. The long run judges how well permits are
    used.
    """
    short = "--tasks 600 --workers 2 --chaos-seconds 6 --quiet-seconds 1 --step-seconds 0.3 --no-restarts"
    said = run("policies", f"{short} --least-use 0 --drain-seconds 60")
    assert "all invariants hold" in said
