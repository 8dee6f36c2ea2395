"""Processes that take turns: each runs in a thread that stops before every store call until it is given the next turn.

::

    first, second = Actor(run_a.take_pass), Actor(run_b.take_pass)
    first.turns(3)          # up to, and without, its fourth call
    second.finish()         # to its end
    first.finish()
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from ps_diloco.store import Store
from tests.stores import Call, FaultyStore


class Killed(BaseException):
    """The process is gone: nothing may catch this."""


class Actor:
    """One process. ``action`` gets a store that stops before each call (``store`` itself, if it can); only one actor moves at any time."""

    def __init__(self, store: Store, action: Callable[[FaultyStore], Any]) -> None:
        self.store = store if isinstance(store, FaultyStore) else FaultyStore(store)
        self.store.before = self._pause
        self.finished = False
        self.result: Any = None
        self.error: BaseException | None = None
        self._go = threading.Semaphore(0)
        self._stopped = threading.Semaphore(0)
        self._thread = threading.Thread(target=self._run, args=(action,), daemon=True)
        self._thread.start()

    def turn(self) -> None:
        """Run up to the next store call, or to the end."""
        if not self.finished:
            self._go.release()
            self._stopped.acquire()

    def turns(self, count: int) -> None:
        """After ``count`` + 1 turns exactly ``count`` store calls are done."""
        for _ in range(count + 1):
            self.turn()

    def finish(self) -> Any:
        """Run to the end; return what the action returned, raise what it raised."""
        while not self.finished:
            self.turn()
        self._thread.join()
        if self.error is not None:
            raise self.error
        return self.result

    def _pause(self, call: Call) -> None:
        self._stopped.release()
        self._go.acquire()

    def _run(self, action: Callable[[FaultyStore], Any]) -> None:
        self._go.acquire()
        try:
            self.result = action(self.store)
        except BaseException as error:  # handed to whoever calls finish
            self.error = error
        self.finished = True
        self._stopped.release()


def killed_at(number: int) -> Callable[[Call], None]:
    """For :class:`FaultyStore`: the process dies before its call of this number."""

    def before(call: Call) -> None:
        if call.number == number:
            raise Killed

    return before
