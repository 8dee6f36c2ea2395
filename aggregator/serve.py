"""The aggregator process: passes in a loop until it is told to end or the run is over."""

from __future__ import annotations

import logging
from collections.abc import Callable

from aggregator.fragment_step import MODEST, Effort, Stopped
from aggregator.outer_step import Aggregator, Outcome
from aggregator.policy import WHOLE, Part
from ps_diloco.env import Backoff
from ps_diloco.errors import Denied, StoreError, Unavailable
from ps_diloco.run import OpenRun
from ps_diloco.threads import Event

log = logging.getLogger(__name__)

SAVE_S_MAX = 15.0
"""For outer state that is saved when the process is told to end: half of the shortest notice that a cloud gives."""


def aggregate_once(run: OpenRun, *, part: Part = WHOLE, effort: Effort = MODEST) -> Outcome:
    """Merge whatever is published now, however little, and return. Raises the store's errors."""
    return Aggregator(run, part=part, effort=effort).take_pass(force="once")


def serve(
    run: OpenRun,
    *,
    stop: Event,
    part: Part = WHOLE,
    effort: Effort = MODEST,
    poll_s: float = 0.5,
    on_outcome: Callable[[Outcome], None] = lambda outcome: None,
) -> Outcome | None:
    """Take passes until ``stop`` is set or the run is final; return the last outcome.

    Between passes it waits ``poll_s``, less if a window closes by time before. A store that is away is waited for; an error in the run itself is raised.
    ``stop`` may be set by a signal handler or another thread: a pass that has not committed yet is given up, which leaves nothing half done; outer state that
    no version names yet is saved.
    """
    aggregator = Aggregator(run, part=part, effort=effort, stop=stop)
    backoff = Backoff(env=run.env, first_s=0.5, max_s=10.0)
    outcome: Outcome | None = None
    while not stop.is_set():
        try:
            outcome = aggregator.take_pass()
        except Stopped:
            break
        except (Unavailable, Denied) as error:
            delay_s = backoff.next_s()
            log.warning("cannot work with the store now, next try in %.1f s: %s", delay_s, error)
            run.env.clock.wait(stop, delay_s)
            continue
        backoff.reset()
        on_outcome(outcome)
        if outcome.kind == "final":
            break
        if outcome.kind == "overtaken":
            run.env.clock.wait(stop, poll_s)
        if outcome.kind == "idle":
            until_s = poll_s if outcome.wake_at_s is None else min(poll_s, outcome.wake_at_s - run.env.clock.monotonic())
            run.env.clock.wait(stop, max(until_s, 0.01))
    try:
        aggregator.save(SAVE_S_MAX)
    except StoreError as error:  # the next one merges some steps again
        log.warning("could not save the outer state: %s", error)
    return outcome
