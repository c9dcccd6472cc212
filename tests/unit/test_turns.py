"""Which queue is claimed from first, and how much each gets."""

from __future__ import annotations

from collections import Counter

from tasklib.policies.queue_policy import QueuePolicy
from tasklib.policies.turns import Turns


def test_without_policies_each_is_the_first_in_its_turn() -> None:
    turns = Turns()
    rounds = [[turn.queue for turn in turns.next_round(["a", "b", "c"], {}, 10)] for _ in range(3)]
    assert sorted(each[0] for each in rounds) == ["a", "b", "c"]
    assert all(sorted(each) == ["a", "b", "c"] for each in rounds)


def test_a_higher_rank_always_comes_first() -> None:
    turns = Turns()
    policies = {"b": QueuePolicy("b", rank=5), "c": QueuePolicy("c", rank=-1)}
    for _ in range(3):
        assert [turn.queue for turn in turns.next_round(["a", "b", "c"], policies, 10)] == ["b", "a", "c"]


def test_capacity_is_divided_by_weight() -> None:
    """Over many rounds, also if one claim is too small to be divided."""
    turns, claimed = Turns(), Counter[str]()
    policies = {"a": QueuePolicy("a", weight=3.0), "b": QueuePolicy("b", weight=1.0)}
    for _ in range(400):
        left = 2
        for queue, share in turns.next_round(["a", "b"], policies, 2):
            taken = min(left, left if share is None else share)
            left -= taken
            claimed[queue] += taken
            turns.note(queue, taken, is_short=False)
    assert claimed.total() == 800
    assert 2.8 <= claimed["a"] / claimed["b"] <= 3.2


def test_an_empty_queue_saves_up_nothing() -> None:
    turns = Turns()
    policies = {"a": QueuePolicy("a", weight=1.0), "b": QueuePolicy("b", weight=9.0)}
    for _ in range(50):
        for queue, _ in turns.next_round(["a", "b"], policies, 10):
            turns.note(queue, 0, is_short=queue == "b")
    first = {turn.queue: turn.share for turn in turns.next_round(["a", "b"], policies, 10) if turn.share is not None}
    assert first["b"] == 9
