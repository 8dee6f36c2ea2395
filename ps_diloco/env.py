"""The only module that touches time and randomness; with :mod:`ps_diloco.threads`, all that a simulation puts its own in place of.

Everything that waits, reads a clock or draws a random name takes an :class:`Env`, so that tests and simulations can put their own in its place::

    env = Env.system()
    env.clock.sleep(0.5)
    attempt = env.entropy.attempt_id()
"""

from __future__ import annotations

import random
import secrets
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Protocol

from ps_diloco.threads import Event, SystemThreads, Threads


class Clock(Protocol):
    """Time of one process. No rule compares the clocks of two machines (format §3)."""

    def monotonic(self) -> float:
        """Seconds since an arbitrary moment; never goes back."""

    def wall_text(self) -> str:
        """Advisory wall-clock time as RFC 3339 text in UTC."""

    def sleep(self, seconds: float) -> None:
        """Block the calling thread."""

    def wait(self, event: Event, timeout_s: float) -> bool:
        """Block until ``event`` is set or the time is over; return whether it is set."""


class Entropy(Protocol):
    """Randomness of one process."""

    def attempt_id(self) -> str:
        """16 random hexadecimal digits (format §2)."""

    def run_id(self) -> str:
        """32 random hexadecimal digits."""

    def uniform(self) -> float:
        """A number in [0, 1), for jitter."""


class SystemClock:
    """The real clock."""

    def monotonic(self) -> float:
        return time.monotonic()

    def wall_s(self) -> float:
        """Seconds since 1970 by this machine's clock: to show, never to decide."""
        return time.time()

    def wall_text(self) -> str:
        return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def wait(self, event: Event, timeout_s: float) -> bool:
        return event.wait(timeout_s)


class SystemEntropy:
    """Unpredictable names and jitter. Leaves the global generators, which belong to the training program, alone."""

    def __init__(self) -> None:
        self._jitter = random.Random()

    def attempt_id(self) -> str:
        return secrets.token_hex(8)

    def run_id(self) -> str:
        return secrets.token_hex(16)

    def uniform(self) -> float:
        return self._jitter.random()


class SeededEntropy:
    """Repeatable names, for tests and simulation. Not thread-safe by itself."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def attempt_id(self) -> str:
        return f"{self._random.getrandbits(64):016x}"

    def run_id(self) -> str:
        return f"{self._random.getrandbits(128):032x}"

    def uniform(self) -> float:
        return self._random.random()


@dataclass(frozen=True, kw_only=True)
class Env:
    """Clock, randomness and threads, passed to whatever needs them."""

    clock: Clock
    entropy: Entropy
    threads: Threads = field(default_factory=SystemThreads)

    @staticmethod
    def system() -> Env:
        return Env(clock=SystemClock(), entropy=SystemEntropy())


@dataclass(kw_only=True)
class Backoff:
    """Delays of a retry loop: exponential, the upper half of each random, bounded (``first_s`` doubling up to ``max_s``)."""

    env: Env
    first_s: float = 0.2
    max_s: float = 30.0
    _failures: int = 0

    def next_s(self) -> float:
        """Seconds to wait before the next try; grows with each call."""
        ceiling = min(self.max_s, self.first_s * 2.0 ** min(self._failures, 30))
        self._failures += 1
        return ceiling * (0.5 + 0.5 * self.env.entropy.uniform())

    def reset(self) -> None:
        """Call after a success."""
        self._failures = 0
