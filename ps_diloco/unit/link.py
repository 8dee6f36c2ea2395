"""Is the bucket there? One visible warning when it is not, one line when it is back."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import TypeVar

from ps_diloco.env import Backoff, Env
from ps_diloco.errors import Denied, Unavailable
from ps_diloco.threads import Event

T = TypeVar("T")
log = logging.getLogger("ps_diloco.unit")

QUIET_S = 10.0
HANGS_S = 15.0
REMIND_S = 60.0


class Link:
    """Runs store calls of background threads until they succeed; training goes on meanwhile. Thread-safe."""

    def __init__(self, env: Env, stop: Event, *, url: str) -> None:
        self._env = env
        self._stop = stop
        self._url = url
        self._lock = threading.Lock()
        self._begun_s: dict[str, float] = {}
        self._since_s: dict[str, float] = {}
        self._warned_at_s: dict[str, float] = {}

    @property
    def away_s(self) -> float:
        """Seconds for which the store has not answered to something; 0 when it answers to everything."""
        now_s = self._env.clock.monotonic()
        with self._lock:
            hanging = [begun_s for begun_s in self._begun_s.values() if now_s - begun_s >= QUIET_S]
            return max((now_s - since_s for since_s in (*self._since_s.values(), *hanging)), default=0.0)

    def begin(self, what: str) -> None:
        """A call starts; :meth:`answered` or :meth:`failed` ends it."""
        with self._lock:
            self._begun_s[what] = self._env.clock.monotonic()

    def look(self) -> None:
        """Warn of calls that hang. Any thread; no I/O."""
        now_s = self._env.clock.monotonic()
        with self._lock:
            hanging = [what for what, begun_s in self._begun_s.items() if now_s - begun_s >= HANGS_S and what not in self._warned_at_s]
            for what in hanging:
                self._since_s.setdefault(what, self._begun_s[what])
                self._warn(what, now_s, "no answer yet")

    def until_done(self, what: str, call: Callable[[], T]) -> T | None:
        """Repeat ``call`` until it answers; None when the unit stops first. Only an absent or refusing store is waited for; other errors are raised."""
        backoff = Backoff(env=self._env, first_s=0.2, max_s=10.0)
        while not self._stop.is_set():
            self.begin(what)
            try:
                result = call()
            except (Unavailable, Denied) as error:
                self.failed(what, error)
                self._env.clock.wait(self._stop, backoff.next_s())
                continue
            self.answered(what)
            return result
        return None

    def answered(self, what: str) -> None:
        with self._lock:
            self._begun_s.pop(what, None)
            since_s = self._since_s.pop(what, None)
            if self._warned_at_s.pop(what, None) is not None and since_s is not None:
                log.warning(
                    "the bucket answers again after %.0f s; catching up (could not %s)", self._env.clock.monotonic() - since_s, what
                )

    def failed(self, what: str, error: Exception) -> None:
        now_s = self._env.clock.monotonic()
        with self._lock:
            begun_s = self._begun_s.pop(what, now_s)
            away_s = now_s - self._since_s.setdefault(what, begun_s)
            silent = away_s < QUIET_S and not isinstance(error, Denied)
            if silent or (what in self._warned_at_s and now_s - self._warned_at_s[what] < REMIND_S):
                return
            self._warn(what, now_s, error)

    def _warn(self, what: str, now_s: float, cause: object) -> None:
        self._warned_at_s[what] = now_s
        log.warning(
            "cannot %s: %s has not answered for %.0f s. Training goes on; two cuts per fragment wait to be sent, after that spans grow, and work "
            "whose base falls behind the run's staleness limit will be refused. Cause: %s",
            what,
            self._url,
            now_s - self._since_s[what],
            cause,
        )
