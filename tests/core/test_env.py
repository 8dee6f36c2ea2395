"""Clock, entropy and backoff (format §2: random attempt ids)."""

from __future__ import annotations

import re
import threading
from datetime import datetime, timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ps_diloco.env import Backoff, Env, SeededEntropy, SystemClock, SystemEntropy

PROPERTY = settings(max_examples=60, deadline=None, derandomize=True)


@PROPERTY
@given(st.integers(0, 2**64))
def test_seeded_names_repeat_and_have_the_right_form(seed: int) -> None:
    one, other = SeededEntropy(seed), SeededEntropy(seed)
    names = [one.attempt_id() for _ in range(20)]
    assert names == [other.attempt_id() for _ in range(20)]
    assert len(set(names)) == 20
    assert all(re.fullmatch(r"[0-9a-f]{16}", name) for name in names)
    assert re.fullmatch(r"[0-9a-f]{32}", one.run_id())
    assert 0 <= one.uniform() < 1


def test_different_seeds_give_different_names() -> None:
    assert len({SeededEntropy(seed).attempt_id() for seed in range(200)}) == 200


def test_system_names_have_the_right_form_and_do_not_repeat() -> None:
    entropy = SystemEntropy()
    attempts = {entropy.attempt_id() for _ in range(1000)}
    assert len(attempts) == 1000
    assert all(re.fullmatch(r"[0-9a-f]{16}", name) for name in attempts)
    assert re.fullmatch(r"[0-9a-f]{32}", entropy.run_id())
    assert all(0 <= entropy.uniform() < 1 for _ in range(100))


def test_the_wall_clock_is_rfc_3339_text_in_utc() -> None:
    text = SystemClock().wall_text()
    assert re.fullmatch(r"\d{4}-\d{2}-\d{2}T\d{2}:\d{2}:\d{2}\.\d{3}Z", text)
    assert datetime.fromisoformat(text).utcoffset() == timedelta(0)


def test_the_monotonic_clock_does_not_go_back() -> None:
    clock = SystemClock()
    readings = [clock.monotonic() for _ in range(100)]
    assert readings == sorted(readings)


def test_waiting_tells_whether_the_event_is_set() -> None:
    clock, event = SystemClock(), threading.Event()
    assert clock.wait(event, 0.0) is False
    event.set()
    assert clock.wait(event, 60.0) is True


class _Extreme:
    """Entropy whose jitter is always the same."""

    def __init__(self, uniform: float) -> None:
        self._uniform = uniform

    def attempt_id(self) -> str:
        return "0" * 16

    def run_id(self) -> str:
        return "0" * 32

    def uniform(self) -> float:
        return self._uniform


@PROPERTY
@given(st.floats(0, 1, exclude_max=True), st.floats(0.001, 5), st.floats(5, 100), st.integers(1, 2000))
def test_backoff_stays_between_half_the_first_delay_and_the_largest(uniform: float, first_s: float, max_s: float, failures: int) -> None:
    backoff = Backoff(env=Env(clock=SystemClock(), entropy=_Extreme(uniform)), first_s=first_s, max_s=max_s)
    delays = [backoff.next_s() for _ in range(failures)]
    assert all(first_s / 2 <= delay <= max_s for delay in delays)
    assert delays == sorted(delays)


def test_backoff_doubles_until_its_bound_and_starts_again_after_a_success() -> None:
    backoff = Backoff(env=Env(clock=SystemClock(), entropy=_Extreme(0.0)), first_s=1.0, max_s=10.0)
    assert [backoff.next_s() for _ in range(6)] == [0.5, 1.0, 2.0, 4.0, 5.0, 5.0]
    backoff.reset()
    assert backoff.next_s() == 0.5


def test_an_environment_cannot_be_changed() -> None:
    env = Env.system()
    with pytest.raises(AttributeError):
        env.clock = SystemClock()  # type: ignore[misc]
