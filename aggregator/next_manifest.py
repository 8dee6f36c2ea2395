"""From a head and what a pass decided to the next manifest (format §5.7). Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from aggregator.admit import Admitted, Refusal
from ps_diloco.fragment import FragmentValue
from ps_diloco.ids import ContributionId
from ps_diloco.layout import Layout
from ps_diloco.merge import Weighing
from ps_diloco.outer import OuterState
from ps_diloco.progress import fragment_share
from ps_diloco.records import (
    COUNT_MAX,
    OUTCOME_CHAR,
    TAKE_BACK,
    Closed,
    Contribution,
    Fingerprint,
    FragmentEntry,
    Incarnation,
    Manifest,
    Merged,
    Parent,
    Refused,
    Round,
    Step,
    Stored,
    UnitEntry,
)

OUTCOMES_KEPT = 64
DETAIL_MAX = 2000


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Stepped:
    """Result of one fragment's outer step. ``before`` and ``after``: its entry in the head and in the next manifest."""

    fragment: int
    before: FragmentEntry
    after: FragmentEntry
    value: FragmentValue
    state: OuterState
    """The parameters and the outer state at ``after``."""
    closed: Closed
    weighing: Weighing
    members: tuple[Admitted, ...]
    gradient_norm: float
    update_norm: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Refusing:
    """A refusal and the record that it is about, None if there is no readable one."""

    refusal: Refusal
    record: Contribution | None

    @property
    def tokens(self) -> int:
        return self.record.tokens if self.record else 0

    @property
    def lost_tokens(self) -> int:
        """Tokens that the unit will not send again (format §8.2)."""
        return 0 if self.refusal.reason in TAKE_BACK else self.tokens


@dataclass(kw_only=True)
class Draft:
    """All that one pass wants to commit. Empty: there is nothing to commit."""

    config: int
    known: Sequence[tuple[ContributionId, int | None]] = ()
    """All undecided contributions that were seen, with their fragment (None: unreadable, so it waits for everything before it)."""
    final: bool = False
    stepped: list[Stepped] = field(default_factory=list)
    refused: dict[ContributionId, Refusing] = field(default_factory=dict)
    tries: dict[ContributionId, int] = field(default_factory=dict)
    listed: dict[str, Incarnation] = field(default_factory=dict)
    saved: dict[int, FragmentEntry] = field(default_factory=dict)
    """Entries of fragments that do not step but whose outer state was saved."""

    @property
    def decided(self) -> set[ContributionId]:
        return {a.candidate.id for stepped in self.stepped for a in stepped.members} | set(self.refused)

    @property
    def undecided(self) -> set[ContributionId]:
        """What was seen and stays undecided."""
        return {contribution for contribution, _ in self.known} - self.decided

    def keep_order(self) -> None:
        """Withdraw refusals that would overtake an earlier contribution of the same unit and fragment which stays undecided (I5)."""
        decided = self.decided
        waiting: dict[str, set[int | None]] = {}
        for contribution, fragment in sorted(self.known, key=lambda pair: pair[0]):
            blocked = waiting.setdefault(contribution.unit, set())
            overtakes = bool(blocked) if fragment is None else fragment in blocked or None in blocked
            if contribution not in decided or (overtakes and contribution in self.refused):
                self.refused.pop(contribution, None)
                blocked.add(fragment)

    def worth_committing(self, head: Manifest) -> bool:
        return bool(self.stepped or self.refused or self.tries or self.listed or self.saved or self.final or self.config != head.config)

    def onto(self, head: Manifest) -> Draft | None:
        """What is left of this draft on another process's new head; None if nothing is.

        A step stays if its fragment and its contributions are untouched; its objects are in the bucket already. A draft that ends the run, or that was made
        with other settings, stays whole or not at all.
        """
        if head.final or head.config > self.config:
            return None

        def open_still(contribution: ContributionId) -> bool:
            entry = head.units.get(contribution.unit)
            return entry is not None and entry.incarnation == contribution.incarnation and entry.outcome(contribution.seq) is None

        stepped = [s for s in self.stepped if head.fragments[s.fragment] == s.before and all(open_still(a.candidate.id) for a in s.members)]
        given_up = {a.candidate.id.unit for s in self.stepped if s not in stepped for a in s.members}
        rest = Draft(
            config=self.config,
            known=[(contribution, fragment) for contribution, fragment in self.known if open_still(contribution)],
            final=self.final,
            stepped=stepped,
            refused={contribution: refusing for contribution, refusing in self.refused.items() if open_still(contribution)},
            tries={contribution: count for contribution, count in self.tries.items() if open_still(contribution)},
            listed={
                unit: record
                for unit, record in self.listed.items()
                if unit not in given_up and (unit not in head.units or head.units[unit].incarnation < record.incarnation)
            },
            saved={
                fragment: entry
                for fragment, entry in self.saved.items()
                if saved_version(head.fragments[fragment]) < saved_version(entry)
                and head.fragments[fragment] == entry.model_copy(update={"state": head.fragments[fragment].state})
            },
        )
        rest.keep_order()
        whole = (len(rest.stepped), rest.refused, rest.tries, rest.listed) == (len(self.stepped), self.refused, self.tries, self.listed)
        if not rest.worth_committing(head) or (self.final and not whole):
            return None
        return rest


def saved_version(entry: FragmentEntry) -> int:
    """The fragment version at which the outer state is saved; that of version 0 is zero and needs no object."""
    return entry.state.fragment_version if entry.state else 0


def rounds_after(before: FragmentEntry, weighing: Weighing, window: int) -> dict[str, Round]:
    """Per unit its last merged contribution, as far as the window reaches back."""
    version = before.fragment_version + 1
    rounds = {unit: last for unit, last in before.rounds.items() if last.fragment_version > version - window}
    rounds.update({c.id.unit: Round(tokens=c.tokens, fragment_version=version) for c in weighing.candidates})
    return rounds


def next_manifest(
    head: Stored[Manifest], draft: Draft, layout: Layout, *, attempt: str, created_at: str, fingerprint: Fingerprint
) -> Manifest:
    """The manifest that follows ``head`` with all that ``draft`` decided."""
    old = head.record
    fragments = list(old.fragments)
    tokens = old.tokens
    for fragment, entry in draft.saved.items():
        fragments[fragment] = entry
    for stepped in draft.stepped:
        fragments[stepped.fragment] = stepped.after
        tokens += fragment_share(layout, stepped.fragment) * sum(a.record.tokens for a in stepped.members)
    return Manifest(
        run_id=old.run_id,
        timeline=old.timeline,
        version=old.version + 1,
        attempt=attempt,
        created_at=created_at,
        parent=Parent(timeline=old.timeline, version=old.version, sha256=head.sha256),
        config=draft.config,
        final=draft.final,
        fingerprint=fingerprint,
        tokens=tokens,
        fragments=tuple(fragments),
        steps=tuple(step_of(stepped) for stepped in draft.stepped),
        refused=tuple(
            Refused(
                contribution=str(contribution),
                fragment=refusing.record.fragment if refusing.record else None,
                tokens=refusing.tokens,
                reason=refusing.refusal.reason,
                detail=refusing.refusal.detail[:DETAIL_MAX],  # it quotes what a unit sent
            )
            for contribution, refusing in sorted(draft.refused.items())
        ),
        units=_units(old, draft),
    )


def step_of(stepped: Stepped) -> Step:
    by_id = {a.candidate.id: a for a in stepped.members}
    weighing = stepped.weighing
    return Step(
        fragment=stepped.fragment,
        to=stepped.after.fragment_version,
        closed=stepped.closed,
        mass=weighing.mass,
        round_tokens=weighing.round_tokens,
        merged=tuple(
            Merged(
                contribution=str(candidate.id),
                record=by_id[candidate.id].sha256,
                size=sum(shard.ref.size for shard in by_id[candidate.id].record.shards),
                tokens=candidate.tokens,
                steps=candidate.steps,
                base=by_id[candidate.id].record.base.fragment_version,
                staleness=candidate.staleness,
                weight=weight,
                coefficient=coefficient,
            )
            for candidate, weight, coefficient in zip(weighing.candidates, weighing.weights, weighing.coefficients, strict=True)
        ),
        gradient_norm=stepped.gradient_norm,
        update_norm=stepped.update_norm,
    )


def _units(old: Manifest, draft: Draft) -> dict[str, UnitEntry]:
    units = dict(old.units)
    for unit, entry in old.units.items():
        merged = {a.candidate.id.seq: a for stepped in draft.stepped for a in stepped.members if a.candidate.id.unit == unit}
        refused = {c.seq: refusing for c, refusing in draft.refused.items() if c.unit == unit}
        tries = {c.seq: count for c, count in draft.tries.items() if c.unit == unit}
        if merged or refused or tries:
            units[unit] = _receipts(entry, merged, refused, tries, len(old.fragments))
    for unit, incarnation in draft.listed.items():
        units[unit] = _listed(units.get(unit), incarnation)
    return units


def _receipts(
    entry: UnitEntry,
    merged: Mapping[int, Admitted],
    refused: Mapping[int, Refusing],
    tries: Mapping[int, int],
    fragments: int,
) -> UnitEntry:
    chars = dict.fromkeys(merged, OUTCOME_CHAR["merged"]) | {seq: OUTCOME_CHAR[r.refusal.reason] for seq, r in refused.items()}
    records = {seq: a.record for seq, a in merged.items()} | {seq: r.record for seq, r in refused.items() if r.record is not None}
    outcomes, bases = list(entry.outcomes), dict(entry.bases)
    for seq in sorted(chars):
        outcomes.extend("." * (seq - entry.first + 1 - len(outcomes)))
        outcomes[seq - entry.first] = chars[seq]
        if seq in records and records[seq].fragment < fragments:
            bases[str(records[seq].fragment)] = records[seq].base.fragment_version
    text = "".join(outcomes)
    leading = text.find(".") if "." in text else len(text)
    dropped = max(0, leading - OUTCOMES_KEPT)
    return UnitEntry(
        incarnation=entry.incarnation,
        region=entry.region,
        first=entry.first + dropped,
        outcomes=text[dropped:],
        tries={
            seq: count for seq, count in (entry.tries | {str(seq): count for seq, count in tries.items()}).items() if int(seq) not in chars
        },
        bases=bases,
        tokens=min(COUNT_MAX, entry.tokens + sum(a.record.tokens for a in merged.values())),
        merged=entry.merged + len(merged),
        refused=entry.refused + len(refused),
        lost=min(COUNT_MAX, entry.lost + sum(refusing.lost_tokens for refusing in refused.values())),
    )


def _listed(entry: UnitEntry | None, incarnation: Incarnation) -> UnitEntry:
    """Receipts of an incarnation that is listed from now on; the totals of its unit go on."""
    return UnitEntry(
        incarnation=incarnation.incarnation,
        region=incarnation.region,
        first=0,
        outcomes="",
        tries={},
        bases=entry.bases if entry else {},
        tokens=entry.tokens if entry else 0,
        merged=entry.merged if entry else 0,
        refused=entry.refused if entry else 0,
        lost=entry.lost if entry else 0,
    )
