"""The witness of the campaign `policies` sees each kind of violation, and nothing where there is none."""

from __future__ import annotations

import json

from tests.campaigns.policy_witness import (
    Body,
    Timeline,
    over_cap,
    over_rate,
    read_bodies,
    started_while_paused,
    used_share,
)


def bodies(*times: tuple[float, float]) -> list[Body]:
    return [Body(f"task {n}", "mail", "a", began, began, ended) for n, (began, ended) in enumerate(times)]


def timeline(*changes: tuple[float, int | None]) -> Timeline[int | None]:
    made: Timeline[int | None] = Timeline()
    for at, value in changes:
        made.note(at, at + 0.1, value)
    return made


def test_one_start_too_many_is_seen() -> None:
    assert len(over_cap(bodies((10, 12), (10.5, 11), (10.9, 13)), timeline((0, 2)))) == 1
    assert over_cap(bodies((10, 12), (10.5, 11), (11.1, 13)), timeline((0, 2))) == []


def test_a_lowered_cap_holds_for_starts_after_a_moment() -> None:
    caps = timeline((0, 2), (20, 1))
    assert over_cap(bodies((19, 30), (21.2, 22)), caps) == []
    assert len(over_cap(bodies((19, 30), (21.5, 22)), caps)) == 1
    assert over_cap(bodies((19, 21.4), (21.5, 22)), caps) == []


def test_a_removed_cap_allows_everything() -> None:
    assert over_cap(bodies((30, 40), (30, 40), (30, 40)), timeline((0, 1), (20, None))) == []


def test_groups_have_a_cap_each() -> None:
    both = [Body("1", "mail", "a", 10, 10, 12), Body("2", "mail", "b", 10, 10, 12)]
    assert over_cap(both, timeline((0, 1)), lambda body: body.worker_id) == []
    assert len(over_cap(both, timeline((0, 1)))) == 1


def test_a_start_in_a_pause_is_seen() -> None:
    pauses: Timeline[bool] = Timeline()
    pauses.note(10, 10.1, value=True)
    pauses.note(20, 20.1, value=False)
    assert started_while_paused(bodies((11.2, 12), (20.05, 21)), pauses) == []
    assert len(started_while_paused(bodies((11.4, 12)), pauses)) == 1


def test_a_period_with_too_many_starts_is_seen() -> None:
    rates = timeline((0, 2))
    assert over_rate(bodies((10, 11), (10.5, 11), (12, 13)), rates, 2.0) == []
    assert len(over_rate(bodies((10, 11), (10.5, 11), (11.9, 13)), rates, 2.0)) == 1


def test_a_body_ends_with_its_worker() -> None:
    """Also one in a process of its own, and one in a worker that another task has killed."""

    def line(event: str, task: str, pid: int, worker: str, at: float) -> str:
        told = {"event": event, "task_id": task, "token": 1, "pid": pid, "monotonic": at, "started": at - 0.01}
        return json.dumps(told | {"worker_id": worker, "queue": "mail"})

    lines = [
        line("began", "whole", 1, "a", 10.0), line("returned", "whole", 1, "a", 11.0),
        line("began", "killed", 1, "a", 10.0), line("began", "apart", 77, "a", 10.0),
        line("began", "guilty", 2, "b", 10.0), line("began", "innocent", 2, "b", 10.0),
        line("crashed", "guilty", 2, "b", 13.0), line("began", "lost", 3, "c", 10.0),
    ]  # fmt: skip
    found, unknown = read_bodies(lines, {1: 12.0}, {"a": 1, "b": 2, "c": 3})
    ends = {body.task_id: body.ended for body in found}
    assert ends == {"whole": 11, "killed": 12, "apart": 12, "guilty": 13, "innocent": 13, "lost": 10}
    assert unknown == 1


def test_the_used_share_is_over_time() -> None:
    assert used_share(bodies((10, 15), (0, 20)), 2, 10, 20) == 0.75
