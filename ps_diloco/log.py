"""The log of versions: find the head, read, commit (format §5.7, §7.4, §7.5).

::

    head = log.find_head(known)                  # upwards from what is known or hinted
    won = log.commit(manifest)                   # None: somebody else took the number
"""

from __future__ import annotations

from dataclasses import dataclass

from ps_diloco import keys
from ps_diloco.env import Env
from ps_diloco.errors import FormatError, IntegrityError, InvariantViolation, NotFound, RunNotFound
from ps_diloco.records import (
    HINT_BYTES_MAX,
    MANIFEST_BYTES_MAX,
    RECORD_BYTES_MAX,
    Head,
    Manifest,
    Stored,
    Timeline,
    decode,
    encode,
    sha256_of,
)
from ps_diloco.store.base import Store
from ps_diloco.store.claim import claim_object

HINT_KEY = keys.HEAD


@dataclass(frozen=True, kw_only=True)
class Log:
    """The manifests of a run in one region. Thread-safe; every method does I/O."""

    store: Store
    env: Env
    run_id: str

    def read(self, timeline: int, version: int) -> Stored[Manifest] | None:
        """The manifest of a version, identity checked; None if it does not exist."""
        key = keys.manifest(timeline, version)
        try:
            body = self.store.get(key, max_bytes=MANIFEST_BYTES_MAX)
        except NotFound:
            return None
        manifest = decode(Manifest, body, key=key, run_id=self.run_id, max_bytes=MANIFEST_BYTES_MAX)
        if (manifest.timeline, manifest.version) != (timeline, version):
            raise IntegrityError(
                "a manifest stands under another number's key", key=key, timeline=manifest.timeline, version=manifest.version
            )
        return Stored(manifest, sha256_of(body))

    def timeline(self, n: int) -> Timeline | None:
        """A timeline's record; None if it does not exist."""
        key = keys.timeline(n)
        try:
            body = self.store.get(key, max_bytes=RECORD_BYTES_MAX)
        except NotFound:
            return None
        record = decode(Timeline, body, key=key, run_id=self.run_id)
        if record.timeline != n:
            raise IntegrityError("a timeline stands under another number's key", key=key, timeline=record.timeline)
        return record

    def newest_timeline(self, known: int = 0) -> Timeline:
        """Upwards from ``known``, which exists."""
        newest = self.timeline(known)
        if newest is None:
            raise RunNotFound("the run has no such timeline; its creation was not finished", url=self.store.url, timeline=known)
        while (following := self.timeline(newest.timeline + 1)) is not None:
            newest = following
        return newest

    def find_head(self, known: Stored[Manifest] | None = None, *, hint: bool = True) -> Stored[Manifest]:
        """The newest manifest, searched upwards from ``known`` (or a hint, or the timeline's first version).

        With ``known`` only its own timeline is searched: one GET when it is the head, about 2 log2(distance) otherwise. Without, the newest timeline is
        found first, whatever the hint says (I9); a timeline that has no manifest yet has its parent as head.
        """
        if known is None:
            hinted = self.read_hint() if hint else None
            timeline = self.newest_timeline(hinted.record.timeline if hinted else 0)
            if hinted is not None and hinted.record.timeline == timeline.timeline:
                return self._climb(hinted)
            known = self.read(timeline.timeline, timeline.first_version)
            if known is None and timeline.parent is not None:
                known = self.read(timeline.parent.timeline, timeline.parent.version)
                if known is not None and known.sha256 != timeline.parent.sha256:
                    raise IntegrityError("a timeline's parent is not the manifest that it names", timeline=timeline.timeline)
                if known is not None:
                    return known
            if known is None:
                raise RunNotFound(
                    "the run has no version 0; its creation was not finished", url=self.store.url, remedy="run the same init again"
                )
        return self._climb(known)

    def _climb(self, low: Stored[Manifest]) -> Stored[Manifest]:
        """Gallop upwards: versions are contiguous (I1), so doubling steps and then halving them finds the last one."""
        timeline, step = low.record.timeline, 1
        while (found := self.read(timeline, low.record.version + step)) is not None:
            low = found
            step *= 2
        while step > 1:
            step //= 2
            found = self.read(timeline, low.record.version + step)
            if found is not None:
                low = found
        return low

    def commit(self, manifest: Manifest) -> Stored[Manifest] | None:
        """Claim the manifest's number: the one commit point of the system. None if somebody else's manifest stands there.

        Raises :class:`Unavailable` when there is no definite answer; the manifest may then still appear, whole, and is valid if it does.
        """
        body = encode(manifest)
        if len(body) > MANIFEST_BYTES_MAX:
            raise InvariantViolation("manifest would be larger than the format allows", size=len(body))
        claim = claim_object(self.store, self.env, keys.manifest(manifest.timeline, manifest.version), body, max_bytes=MANIFEST_BYTES_MAX)
        return Stored(manifest, sha256_of(body)) if claim.won else None

    def read_hint(self) -> Stored[Manifest] | None:
        """The manifest that ``head.json`` names, if hint and manifest agree; None for any hint that is absent, stale beyond use, or garbage."""
        return self._hinted(None)[1]

    def read_hint_after(self, known: Stored[Manifest]) -> tuple[bool, Stored[Manifest] | None]:
        """(whether the hint is of use, what it names if that is newer than ``known``). One GET when it is not newer."""
        return self._hinted(known)

    def _hinted(self, known: Stored[Manifest] | None) -> tuple[bool, Stored[Manifest] | None]:
        after = (known.record.timeline, known.record.version) if known else (-1, -1)
        try:
            hint = decode(
                Head, self.store.get(HINT_KEY, max_bytes=HINT_BYTES_MAX), key=HINT_KEY, run_id=self.run_id, max_bytes=HINT_BYTES_MAX
            )
            if (hint.timeline, hint.version) <= after:
                return True, None
            named = self.read(hint.timeline, hint.version)
        except (NotFound, FormatError):
            return False, None  # a hint is a guess: whoever asked goes on without it (I9)
        return (True, named) if named is not None and named.sha256 == hint.sha256 else (False, None)

    def write_hint(self, head: Stored[Manifest]) -> None:
        """Overwrite ``head.json``. Callers keep below one write a second, which is all that GCS takes of one name."""
        hint = Head(
            run_id=self.run_id,
            timeline=head.record.timeline,
            version=head.record.version,
            sha256=head.sha256,
            nonce=self.env.entropy.attempt_id(),
        )
        self.store.put(HINT_KEY, encode(hint), overwrite=True)
