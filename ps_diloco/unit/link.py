"""Is the bucket there? One visible warning when it is not, one line when it is back."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import TypeVar

from ps_diloco.env import Backoff, Env
from ps_diloco.errors import Denied, Unavailable

T = TypeVar("T")
log = logging.getLogger("ps_diloco.unit")

QUIET_S = 10.0
REMIND_S = 60.0


class Link:
    """Runs store calls of background threads until they succeed; training goes on meanwhile. Thread-safe."""

    def __init__(self, env: Env, stop: threading.Event, *, url: str) -> None:
        self._env = env
        self._stop = stop
        self._url = url
        self._lock = threading.Lock()
        self._away_since_s: float | None = None
        self._warned_at_s: float | None = None

    @property
    def away_s(self) -> float:
        """Seconds for which the store has not answered; 0 when it does."""
        with self._lock:
            return 0.0 if self._away_since_s is None else self._env.clock.monotonic() - self._away_since_s

    def until_done(self, what: str, call: Callable[[], T]) -> T | None:
        """Repeat ``call`` until it answers; None when the unit stops first. Only an absent or refusing store is waited for; other errors are raised."""
        backoff = Backoff(env=self._env, first_s=0.2, max_s=10.0)
        while not self._stop.is_set():
            try:
                result = call()
            except (Unavailable, Denied) as error:
                self.failed(what, error)
                self._env.clock.wait(self._stop, backoff.next_s())
                continue
            self.answered()
            return result
        return None

    def answered(self) -> None:
        with self._lock:
            if self._warned_at_s is not None and self._away_since_s is not None:
                log.warning("the bucket answers again after %.0f s; catching up", self._env.clock.monotonic() - self._away_since_s)
            self._away_since_s = self._warned_at_s = None

    def failed(self, what: str, error: Exception) -> None:
        now_s = self._env.clock.monotonic()
        with self._lock:
            if self._away_since_s is None:
                self._away_since_s = now_s
            refused = isinstance(error, Denied)
            silent = now_s - self._away_since_s < QUIET_S and not refused
            if silent or (self._warned_at_s is not None and now_s - self._warned_at_s < REMIND_S):
                return
            self._warned_at_s = now_s
            log.warning(
                "cannot %s: %s has not answered for %.0f s. Training goes on; two cuts per fragment wait to be sent, after that spans grow, and work "
                "whose base falls behind the run's staleness limit will be refused. Cause: %s",
                what,
                self._url,
                now_s - self._away_since_s,
                error,
            )
