"""Several aggregators that share the fragments, each with a thread and a store of its own, on real servers: each contribution is merged exactly once,
and what belongs to one that is gone is taken over."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from aggregator.policy import Part
from aggregator.serve import serve
from ps_diloco.env import Env
from ps_diloco.run import OpenRun
from ps_diloco.store import Store
from tests.aggregator.bench import ADDITIVE, announce, merged_in, publish, tiny_run, walk

ROUNDS, UNITS = 4, "abc"


class Process:
    """An aggregator in a thread. ``stop`` is a clean end; what it had not committed by then is for the others to do."""

    def __init__(self, run: OpenRun, part: Part) -> None:
        self.stop = threading.Event()
        self.fragments: list[int] = []
        """Of the steps that it committed."""
        opened = OpenRun(store=run.store, env=Env.system(), record=run.record)
        self._thread = threading.Thread(target=self._run, args=(opened, part), daemon=True)
        self._thread.start()

    def _run(self, run: OpenRun, part: Part) -> None:
        serve(run, stop=self.stop, part=part, poll_s=0.02, on_outcome=lambda outcome: self._note(outcome.kind, outcome.head.record.steps))

    def _note(self, kind: str, steps: tuple) -> None:  # type: ignore[type-arg]
        if kind == "committed":
            self.fragments.extend(step.fragment for step in steps)

    def end(self) -> None:
        self.stop.set()
        self._thread.join(30)
        assert not self._thread.is_alive()


def until(holds: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


@pytest.mark.parametrize("store", ["local", "seaweedfs", "fake-gcs"], indirect=True)
def test_parts_share_the_work_and_take_over_from_one_that_is_gone(store: Store) -> None:
    run = tiny_run(store, env=Env.system(), fragments=2, **ADDITIVE)
    for unit in UNITS:
        announce(run, unit)
    processes = [Process(run, Part(index=index, of=2, patience_s=3.0)) for index in range(2)]
    until(lambda: set(run.log.find_head().record.units) == set(UNITS))

    def publish_round(number: int) -> None:
        for unit in UNITS:
            publish(run, unit, 2 * number, [0.5] * 4, fragment=0)
            publish(run, unit, 2 * number + 1, [0.25] * 3, fragment=1)
        wanted = (number + 1) * 2 * len(UNITS)
        until(lambda: sum(entry.merged for entry in run.log.find_head().record.units.values()) == wanted)

    for number in range(2):
        publish_round(number)
    assert [set(process.fragments) for process in processes] == [{0}, {1}]
    processes[0].end()
    for number in range(2, ROUNDS):
        publish_round(number)
    assert set(processes[1].fragments) == {0, 1}
    processes[1].end()
    history = walk(run)
    assert len(merged_in(history)) == ROUNDS * 2 * len(UNITS)
