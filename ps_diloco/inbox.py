"""What units published and nobody decided yet (format §7.4 steps 1 and 3).

Discovery is by number, not by listing: per unit one GET of the next record. New units and incarnations are looked for now and then.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass

from ps_diloco import keys
from ps_diloco.errors import FormatError, NotFound, StoreError
from ps_diloco.ids import UNIT_NAME, ContributionId
from ps_diloco.records import RECORD_BYTES_MAX, UNDECIDED_MAX, Contribution, Incarnation, Manifest, decode, sha256_of
from ps_diloco.run import OpenRun

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Incoming:
    """A published record, not trusted yet. ``record`` is None when the bytes are no record; ``problem`` says why."""

    id: ContributionId
    sha256: str
    record: Contribution | None
    problem: str
    first_seen_s: float
    """This process's monotonic clock."""


class Inbox:
    """Undecided records of the listed incarnations, read once each. One thread; every method does I/O."""

    def __init__(self, run: OpenRun) -> None:
        self._run = run
        self._known: dict[ContributionId, Incoming] = {}
        self.unread: set[str] = set()
        """Units whose next record could not be read in the last :meth:`refresh`."""

    def refresh(self, head: Manifest) -> list[Incoming]:
        """All undecided records that can be read, in (unit, seq) order. One GET per unit when nothing is new.

        A unit whose next record cannot be read now waits, and keeps nobody else waiting.
        """
        wanted: list[Incoming] = []
        self.unread = set()
        for unit, entry in sorted(head.units.items()):
            try:
                for seq in range(entry.first_undecided, entry.first_undecided + UNDECIDED_MAX):
                    if entry.outcome(seq) is not None:
                        continue
                    incoming = self._get(ContributionId(head.timeline, unit, entry.incarnation, seq))
                    if incoming is None:
                        break
                    wanted.append(incoming)
            except StoreError as error:
                self.unread.add(unit)
                log.warning("the next record of unit %s cannot be read now: %s", unit, error)
        self._known = {incoming.id: incoming for incoming in wanted}
        return wanted

    def _get(self, contribution: ContributionId) -> Incoming | None:
        if contribution in self._known:
            return self._known[contribution]
        key = keys.record(contribution)
        body, problem = b"", ""
        record: Contribution | None = None
        try:
            body = self._run.store.get(key, max_bytes=RECORD_BYTES_MAX)
            found = decode(Contribution, body, key=key, run_id=self._run.run_id)
            if found.id == contribution:
                record = found
            else:
                problem = f"the record under the key of {contribution} says that it is {found.id}"
        except NotFound:
            return None
        except FormatError as error:  # also a record beyond the limit, of which nothing was read
            problem = str(error)
        return Incoming(
            id=contribution, sha256=sha256_of(body), record=record, problem=problem[:1900], first_seen_s=self._run.env.clock.monotonic()
        )

    def discover(self, head: Manifest) -> dict[str, Incarnation]:
        """unit -> newest incarnation, for units whose newest one is not listed in ``head``. One LIST and a GET per unit."""
        found: dict[str, Incarnation] = {}
        for unit in self._unit_names():
            listed = head.units.get(unit)
            try:
                newest = newest_incarnation(self._run, unit, after=listed.incarnation if listed else -1)
            except (FormatError, StoreError) as error:  # one unit's garbage must not stop the others
                log.warning("unit %s is not listed: %s", unit, error)
                continue
            if newest is not None:
                found[unit] = newest
        return found

    def _unit_names(self) -> Iterable[str]:
        for prefix in self._run.store.list_prefixes(keys.UNITS):
            name = prefix.removeprefix(keys.UNITS).rstrip("/")
            if UNIT_NAME.fullmatch(name):
                yield name
            else:
                log.warning("ignored a folder below units/ that is no unit name: %r", name)


def newest_incarnation(run: OpenRun, unit: str, *, after: int = -1) -> Incarnation | None:
    """The unit's newest incarnation above ``after``, searched upwards by number; None if there is none. Does I/O."""
    newest: Incarnation | None = None
    while True:
        key = keys.incarnation(unit, after + 1 if newest is None else newest.incarnation + 1)
        number = keys.parse_incarnation(key)
        try:
            body = run.store.get(key, max_bytes=RECORD_BYTES_MAX)
        except NotFound:
            return newest
        record = decode(Incarnation, body, key=key, run_id=run.run_id)
        if (record.unit, record.incarnation) != (unit, number):
            raise FormatError("an incarnation stands under another's key", key=key)
        newest = record
