"""Threads, and all that they wait with.

A unit's background threads and the aggregator make none of these themselves but ask ``env.threads``, so that a simulation can decide who runs when::

    ready = env.threads.event()
    thread = env.threads.thread(loop, name="ps-diloco-puller")
    thread.start()

A plain ``threading.Lock`` may stay where it is held for a moment only: never during a store call, a wait or another call of an :class:`~ps_diloco.env.Env`.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from types import TracebackType
from typing import Any, Protocol


class Event(Protocol):
    """What ``threading.Event`` does."""

    def is_set(self) -> bool: ...

    def set(self) -> None: ...

    def wait(self, timeout: float | None = None) -> bool: ...


class Condition(Protocol):
    """What ``threading.Condition`` does."""

    def __enter__(self) -> bool: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None: ...

    def wait_for(self, predicate: Callable[[], bool], timeout: float | None = None) -> bool: ...

    def notify_all(self) -> None: ...


class Queue(Protocol):
    """What ``queue.SimpleQueue`` does: unbounded, first in, first out."""

    def put(self, item: Any) -> None: ...

    def get(self) -> Any: ...


class Thread(Protocol):
    """What ``threading.Thread`` does."""

    def start(self) -> None: ...

    def join(self, timeout: float | None = None) -> None: ...

    def is_alive(self) -> bool: ...


class Threads(Protocol):
    """Makes threads and all that they wait with."""

    def thread(self, run: Callable[[], None], *, name: str) -> Thread:
        """A thread that does not keep the process alive; not started."""

    def pool(self, count: int, *, name: str) -> Executor:
        """``count`` threads that work off what is submitted."""

    def event(self) -> Event: ...

    def condition(self) -> Condition: ...

    def queue(self) -> Queue: ...


class SystemThreads:
    """The real ones."""

    def thread(self, run: Callable[[], None], *, name: str) -> Thread:
        return threading.Thread(target=run, name=name, daemon=True)

    def pool(self, count: int, *, name: str) -> Executor:
        return ThreadPoolExecutor(count, name)

    def event(self) -> Event:
        return threading.Event()

    def condition(self) -> Condition:
        return threading.Condition()

    def queue(self) -> Queue:
        return queue.SimpleQueue[Any]()
