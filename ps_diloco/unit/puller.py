"""Following the head (format §7.6): one background thread that reads new versions and hands them to the engine."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from ps_diloco.checkpoint import read_fragment
from ps_diloco.env import Backoff
from ps_diloco.errors import Denied, Fenced, FormatError, NotFound, Unavailable, UnknownFormat
from ps_diloco.fragment import FragmentValue
from ps_diloco.records import Base, Manifest, Stored
from ps_diloco.run import OpenRun
from ps_diloco.threads import Event
from ps_diloco.unit.link import Link

log = logging.getLogger("ps_diloco.unit")

PROBE_EVERY = 10
PULL = "pull a version"


@dataclass(frozen=True, kw_only=True)
class News:
    """A version with the value of every fragment in it. Values are shared between threads and never changed."""

    head: Stored[Manifest]
    values: tuple[FragmentValue, ...]

    def base(self, fragment: int) -> Base:
        entry = self.head.record.fragments[fragment]
        return Base(fragment_version=entry.fragment_version, sha256=entry.sha256)


def read_news(run: OpenRun, head: Stored[Manifest], held: News | None) -> News:
    """Every fragment of a version; unchanged ones are taken from ``held``. Does I/O."""
    values = []
    for fragment, entry in enumerate(head.record.fragments):
        old = None if held is None else (held.head.record.fragments[fragment], held.values[fragment])
        if old is not None and old[0].sha256 == entry.sha256 and old[0].fragment_version == entry.fragment_version:
            values.append(old[1])
        else:
            values.append(read_fragment(run, entry, fragment, held=None if old is None else (old[0].fragment_version, old[1])))
    return News(head=head, values=tuple(values))


class Puller:
    """Polls ``head.json``; every tenth time, or when the hint is no use, asks for the next manifest number itself (I9)."""

    def __init__(
        self,
        run: OpenRun,
        first: News,
        link: Link,
        stop: Event,
        *,
        poll_s: float,
        on_news: Callable[[News], None],
        on_error: Callable[[BaseException], None],
    ) -> None:
        self._run = run
        self._held = first
        self._link = link
        self._stop = stop
        self._poll_s = poll_s
        self._on_news = on_news
        self._on_error = on_error
        self._polls = 0
        self._thread = run.env.threads.thread(self._loop, name="ps-diloco-puller")

    def start(self) -> None:
        self._thread.start()

    def join(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)

    def _loop(self) -> None:
        env = self._run.env
        backoff = Backoff(env=env, first_s=self._poll_s, max_s=10.0)
        try:
            while not self._stop.is_set() and not self._held.head.record.final:
                self._link.begin(PULL)
                try:
                    self.poll()
                except (Unavailable, Denied) as error:
                    self._link.failed(PULL, error)
                    env.clock.wait(self._stop, backoff.next_s())
                    continue
                except UnknownFormat:
                    raise
                except (FormatError, NotFound) as error:
                    # a version that was replaced while it was read, or damage: either way a newer one may be whole
                    log.warning("cannot use a version, will try a newer one: %s", error)
                    self._link.answered(PULL)
                    env.clock.wait(self._stop, backoff.next_s())
                    self._polls = 0
                    continue
                backoff.reset()
                self._link.answered(PULL)
                env.clock.wait(self._stop, self._poll_s * (0.75 + 0.5 * env.entropy.uniform()))
        except BaseException as error:  # reported to the training thread, which raises it
            self._on_error(error)

    def poll(self) -> bool:
        """Look once; hand over and return True if there is a newer version. Does I/O."""
        known = self._held.head
        usable, newest = self._run.log.read_hint_after(known)
        if newest is None and (not usable or self._polls % PROBE_EVERY == 0):
            climbed = self._run.log.find_head(known)
            newest = climbed if climbed.sha256 != known.sha256 else None
        self._polls += 1
        if newest is None:
            return False
        if newest.record.timeline != known.record.timeline:
            raise Fenced(
                "the run goes on in a newer timeline",
                timeline=newest.record.timeline,
                joined=known.record.timeline,
                remedy="start the unit again",
            )
        news = read_news(self._run, newest, self._held)
        self._on_news(news)
        self._held = news
        return True
