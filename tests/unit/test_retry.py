"""How long a task waits before its next attempt."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasklib.errors import InvalidOptions
from tasklib.retry import MAX_DELAY_SECONDS, Exponential, Fixed, Linear, delay_seconds

if TYPE_CHECKING:
    from tasklib.retry import Backoff

SECONDS = st.floats(0, MAX_DELAY_SECONDS)
SHARES = st.floats(0, 1)
RETRIES = st.integers(1, 1_000_000)


def policies(jitter: st.SearchStrategy[float]) -> st.SearchStrategy[Exponential | Linear | Fixed]:
    multipliers = st.floats(1, 1e300) | st.floats(1, 3)
    return st.one_of(
        st.builds(Exponential, SECONDS, multipliers, SECONDS, jitter),
        st.builds(Linear, SECONDS, SECONDS, jitter),
        st.builds(Fixed, SECONDS, jitter, SECONDS),
    )


def test_the_defaults_wait_five_ten_and_twenty_seconds() -> None:
    """Three retries: exactly these, with no chance in them."""
    assert [delay_seconds(Exponential(), retry, chance) for retry, chance in ((1, 0.0), (2, 0.5), (3, 1.0))] == [
        5.0,
        10.0,
        20.0,
    ]


def test_each_policy_grows_in_its_own_way() -> None:
    """By a factor, by a step, or not at all."""
    assert [delay_seconds(Exponential(1, 3.0), retry) for retry in (1, 2, 3, 4)] == [1, 3, 9, 27]
    assert [delay_seconds(Linear(2), retry) for retry in (1, 2, 3, 4)] == [2, 4, 6, 8]
    assert [delay_seconds(Fixed(7), retry) for retry in (1, 2, 3, 4)] == [7, 7, 7, 7]
    assert [delay_seconds(lambda retry: retry**2, retry) for retry in (1, 2, 3)] == [1, 4, 9]


def test_a_cap_ends_the_growth() -> None:
    """Every policy has one; without a word it is a year."""
    assert [delay_seconds(Exponential(cap_seconds=12), retry) for retry in (1, 2, 3, 1000)] == [5, 10, 12, 12]
    assert delay_seconds(Linear(5, cap_seconds=7), 2) == 7
    assert delay_seconds(Fixed(5, cap_seconds=3), 1) == 3
    assert delay_seconds(Exponential(), 1_000_000) == MAX_DELAY_SECONDS
    assert delay_seconds(lambda _: 1e300, 1) == MAX_DELAY_SECONDS


@given(policy=policies(SHARES), retry=RETRIES, chance=SHARES)
def test_every_delay_is_finite_and_within_the_cap(
    policy: Exponential | Linear | Fixed, retry: int, chance: float
) -> None:
    """For the millionth retry too: an exponential overflows a float at the thousandth."""
    delay = delay_seconds(policy, retry, chance)
    assert math.isfinite(delay)
    assert 0 <= delay <= policy.cap_seconds


def test_whole_numbers_are_as_good_as_floats() -> None:
    """Exponential(5, 2) is what people write."""
    assert delay_seconds(Exponential(5, 2), 1_000_000) == MAX_DELAY_SECONDS


@given(policy=policies(st.just(0.0)), retries=st.tuples(RETRIES, RETRIES), chance=SHARES)
def test_without_jitter_no_delay_is_shorter_than_an_earlier_one(
    policy: Exponential | Linear | Fixed, retries: tuple[int, int], chance: float
) -> None:
    """Nor does chance matter."""
    earlier, later = sorted(retries)
    assert delay_seconds(policy, earlier, chance) <= delay_seconds(policy, later, 1 - chance)
    assert delay_seconds(policy, earlier) <= delay_seconds(policy, earlier + 1)


@given(policy=policies(SHARES), retry=RETRIES, chance=SHARES)
def test_jitter_is_a_share_of_the_delay(policy: Exponential | Linear | Fixed, retry: int, chance: float) -> None:
    """Added or taken away; one half of chance changes nothing; and the cap holds."""
    plain = delay_seconds(policy, retry)
    delay = delay_seconds(policy, retry, chance)
    tolerance = 1e-9 * plain
    assert plain * (1 - policy.jitter) - tolerance <= delay <= plain * (1 + policy.jitter) + tolerance
    assert delay_seconds(policy, retry, 0.0) <= delay_seconds(policy, retry, 1.0)


def test_jitter_reaches_both_ends() -> None:
    """A tenth of ten seconds is from nine to eleven."""
    policy = Fixed(10, jitter=0.1)
    assert [delay_seconds(policy, 1, chance) for chance in (0.0, 0.5, 1.0)] == pytest.approx([9, 10, 11])


@pytest.mark.parametrize("nonsense", [math.nan, -1, -math.inf])
def test_nonsense_from_a_callable_is_no_delay(nonsense: float) -> None:
    """A function of the user's must not cost the task its retry."""
    assert delay_seconds(lambda _: nonsense, 1) == 0.0


def test_infinity_from_a_callable_is_the_longest_delay() -> None:
    """It asked for long."""
    assert delay_seconds(lambda _: math.inf, 1) == MAX_DELAY_SECONDS


@given(wanted=st.floats(), retry=RETRIES, chance=SHARES)
def test_whatever_number_a_callable_returns_the_delay_is_sane(wanted: float, retry: int, chance: float) -> None:
    """NaN, infinities and subnormals too."""
    assert 0 <= delay_seconds(lambda _: wanted, retry, chance) <= MAX_DELAY_SECONDS


@pytest.mark.parametrize("nonsense", [None, "soon", [1]])
def test_what_is_no_number_is_an_error_for_the_worker_to_handle(nonsense: Any) -> None:
    """It says so and uses the default policy: a pure function has nobody to tell."""
    backoff: Backoff = lambda _: nonsense  # noqa: E731 - a user's
    with pytest.raises((TypeError, ValueError)):
        delay_seconds(backoff, 1)


WRONG_SECONDS: list[Any] = [-1, math.nan, math.inf, MAX_DELAY_SECONDS + 1, True, "5", None]


@pytest.mark.parametrize("wrong", WRONG_SECONDS)
@pytest.mark.parametrize(
    ("policy", "parameter"),
    [
        (Exponential, "base_seconds"),
        (Exponential, "cap_seconds"),
        (Linear, "step_seconds"),
        (Linear, "cap_seconds"),
        (Fixed, "seconds"),
    ],
)
def test_a_policy_refuses_seconds_that_are_none(policy: Any, parameter: str, wrong: Any) -> None:
    """When the policy is made, and by name; not at the first failure of a task."""
    with pytest.raises(InvalidOptions, match=parameter):
        policy(**{parameter: wrong})


@pytest.mark.parametrize("wrong", [-0.1, 1.1, math.nan, True, "0.1", None])
@pytest.mark.parametrize("policy", [Exponential, Linear, lambda **given: Fixed(1, **given)])
def test_a_policy_refuses_a_jitter_that_is_no_share(policy: Any, wrong: Any) -> None:
    """More than all of the delay cannot be taken away."""
    with pytest.raises(InvalidOptions, match="jitter"):
        policy(jitter=wrong)


@pytest.mark.parametrize("wrong", [0.99, 0, -2, math.nan, math.inf])
def test_a_multiplier_never_shrinks(wrong: float) -> None:
    """Nor is it infinite: 0 * infinity is no number."""
    with pytest.raises(InvalidOptions, match="multiplier"):
        Exponential(multiplier=wrong)
