"""Short campaigns with daemons, as `dev.py soak daemon` runs them at length. Figures are judged there, on a quiet
machine; here it is that nothing is lost, done twice, or paid for by who has done nothing.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SHORT_ZOO = """
--rounds 1 --animals 3 --seconds-per-animal 0.2 --lease-seconds 2 --bury-after 1 --load 0.2 --on-time-percent 50
"""


def run(scenario: str, options: str) -> str:
    """What it said. It must not have found anything wrong."""
    command = [sys.executable, "-W", "error", "-m", f"tests.campaigns.daemon_{scenario}", *options.split()]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=170)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


@pytest.mark.slow
@pytest.mark.direct
def test_nobody_pays_for_children_that_are_killed() -> None:
    """After kill -9 of random ones, what was executing runs again, and no attempt is charged."""
    said = run("kills", "--kills 10 --seconds-per-kill 1 --rate 10 --recovery-seconds 30")
    assert "all invariants hold" in said


@pytest.mark.slow
@pytest.mark.direct
def test_nobody_survives_a_supervisor_that_is_killed() -> None:
    """Also who has left its session; and the other daemon takes over."""
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
def test_hostile_tasks_end_and_harmless_ones_do_not_pay() -> None:
    """One that crashes its worker is buried, one that never ends is timed out; who kills its supervisor leaves nobody
    behind, and the next daemon goes on.
    """
    said = run("zoo", SHORT_ZOO)
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
    """Delayed tasks, and retries; and tasks are seen to run. How punctually is judged on a quiet machine."""
    said = run("punctual", "--rounds 1 --late-seconds 20 --visible-seconds 20")
    assert "all bounds hold" in said


@pytest.mark.slow
@pytest.mark.direct
def test_counters_are_right_though_workers_are_killed() -> None:
    """As often as they are to be killed; and every attempt is counted once."""
    said = run("counters", "--kills 8 --tasks-per-kill 30")
    assert "all counters agree" in said


@pytest.mark.slow
@pytest.mark.direct
def test_bad_rows_keep_nobody_from_being_recovered() -> None:
    """Rows with extreme values in every table, and among what the victims hold; what is healthy is completed."""
    said = run("poison", "--kills 5 --seconds-per-kill 1 --rate 10 --share 0.1 --recovery-seconds 60")
    assert "all invariants hold" in said


@pytest.mark.slow
@pytest.mark.direct
def test_scrapes_are_answered_while_a_backlog_is_drained() -> None:
    """All of them. What they cost is not for a machine to say on which others work."""
    said = run("scrapes", "--rounds 1 --tasks 2000 --least-share 0.2")
    assert "all bounds hold" in said


@pytest.mark.slow
@pytest.mark.direct
def test_no_value_of_a_page_is_read_half_written() -> None:
    """The supervisor judges workers by what it reads there: a torn beacon is a hung worker."""
    said = run("beacon", "--seconds 2")
    assert "no value was read torn" in said


@pytest.mark.slow
@pytest.mark.direct
def test_nobody_pays_for_connections_that_others_use_up() -> None:
    """Tasks that write through their own connection wait for it, or are given back; each writes once."""
    said = run("connections", "--rounds 3 --rate 8 --longest-seconds 5")
    assert "all invariants hold" in said


@pytest.mark.slow
@pytest.mark.direct
def test_suspects_start_beside_any_load() -> None:
    """Workers are killed under a backlog, and beside long tasks; how soon is judged on a quiet machine."""
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
def test_locked_rows_hold_up_nobody_else() -> None:
    """Tasks lock their own rows, and users those of others: thirty other tasks end meanwhile, one after the other."""
    said = run("locks", "--seconds 2 --round-trips 30 --least-share 0")
    assert "all invariants hold" in said


@pytest.mark.slow
@pytest.mark.direct
def test_many_queues_names_and_large_arguments_are_borne() -> None:
    """In small; how well is judged on a quiet machine."""
    small = "--queues 300 --tasks 1500 --large 8 --names 200"
    said = run("wide", f"{small} --least-share 0 --default-seconds 60 --more-seconds 10")
    assert "all bounds hold" in said
