"""What a manifest may change (format §7.5): checked by whoever commits, and by whoever audits. Pure.

The rules are the invariants I1, I2, I4, I5 and I6 seen from one version to the next.
"""

from __future__ import annotations

from collections.abc import Callable

from ps_diloco.checkpoint import check_chain
from ps_diloco.errors import InvariantViolation
from ps_diloco.ids import ContributionId
from ps_diloco.layout import Layout
from ps_diloco.progress import fragment_share
from ps_diloco.records import COUNT_MAX, TAKE_BACK, FragmentEntry, Manifest, Parent, Stored, UnitEntry

Rule = Callable[..., None]


def check_transition(head: Stored[Manifest], new: Manifest, layout: Layout) -> None:
    """Raise :class:`InvariantViolation` naming the rule unless ``new`` may follow ``head`` in the same timeline."""
    old = head.record

    def rule(holds: bool, text: str, **facts: object) -> None:
        if not holds:
            where = {"timeline": old.timeline, "version": new.version, **facts}
            raise InvariantViolation(text, remedy="report it, with this text", **where)

    rule(not old.final, "nothing follows a final manifest (§7.7)")
    rule(new.parent == Parent(timeline=old.timeline, version=old.version, sha256=head.sha256), "parent is not the head (I4)")
    rule((new.timeline, new.version) == (old.timeline, old.version + 1), "version is not the head's plus one (I1)")
    rule(new.run_id == old.run_id, "manifest belongs to another run")
    rule(new.config >= old.config, "config number went back")
    _check_fragments(old, new, layout, rule)
    _check_decisions(old, new, rule)
    rule(set(old.units) <= set(new.units), "a unit's receipts disappeared (I5)")
    for unit, before in old.units.items():
        _check_receipts(unit, before, new.units[unit], _decided(new, unit), rule)
        _check_totals(unit, before, new, rule)
    for unit, entry in new.units.items():
        fresh = (entry.first, entry.outcomes, entry.merged, entry.refused) == (0, "", 0, 0)
        rule(unit in old.units or fresh, "a new unit starts with receipts (I5)", unit=unit)


def _check_fragments(old: Manifest, new: Manifest, layout: Layout, rule: Rule) -> None:
    rule(len(new.fragments) == len(old.fragments) == len(layout.fragments), "number of fragments changed")
    stepped = {step.fragment: step for step in new.steps}
    rule(len(stepped) == len(new.steps), "a fragment steps twice in one manifest")
    rule(all(fragment < len(new.fragments) for fragment in stepped), "a fragment that does not exist steps")
    gained = 0.0
    for index, (before, after) in enumerate(zip(old.fragments, new.fragments, strict=True)):
        step = stepped.get(index)
        if step is None:
            if before != after:
                rule(_only_saved(before, after), "a fragment changed without a step", fragment=index)
                check_chain(after, index)
            continue
        rule(step.to == after.fragment_version == before.fragment_version + 1, "a step is not by one fragment version", fragment=index)
        check_chain(after, index)
        kept = {delta.fragment_version: delta for delta in after.deltas}
        rule(all(kept.get(d.fragment_version, d) == d for d in before.deltas), "a step changed an older delta", fragment=index)
        rule(after.anchor == before.anchor or after.anchor.fragment_version == step.to, "a step changed an older anchor", fragment=index)
        tokens = sum(merged.tokens for merged in step.merged)
        rule(
            abs(after.tokens - before.tokens - tokens) <= 1e-9 * after.tokens,
            "a fragment's tokens do not grow by what was merged",
            fragment=index,
        )
        gained += fragment_share(layout, index) * tokens
    rule(abs(new.tokens - old.tokens - gained) <= 1e-9 * max(1.0, new.tokens), "the run's tokens do not grow by what was merged")


def _only_saved(before: FragmentEntry, after: FragmentEntry) -> bool:
    """Whether nothing happened to a fragment but that its outer state was saved later than before."""
    newer = after.state is not None and (before.state is None or after.state.fragment_version > before.state.fragment_version)
    return newer and after == before.model_copy(update={"state": after.state})


def _check_decisions(old: Manifest, new: Manifest, rule: Rule) -> None:
    names = [merged.contribution for step in new.steps for merged in step.merged] + [refused.contribution for refused in new.refused]
    rule(len(set(names)) == len(names), "a contribution is decided twice in one manifest (I2)")
    for name in names:
        contribution = ContributionId.parse(name)
        rule(contribution.timeline == new.timeline, "a contribution of another timeline is decided", contribution=name)
        before = old.units.get(contribution.unit)
        if before is None or contribution.incarnation != before.incarnation:
            rule(False, "a contribution of a fenced or unlisted incarnation is decided (I6)", contribution=name)
        else:
            rule(before.outcome(contribution.seq) is None, "a decided contribution is decided again (I2)", contribution=name)


def _decided(new: Manifest, unit: str) -> dict[int, str]:
    """seq -> outcome of what ``new`` decides about a unit."""
    found = {ContributionId.parse(merged.contribution): "merged" for step in new.steps for merged in step.merged}
    found.update({ContributionId.parse(refused.contribution): refused.reason for refused in new.refused})
    return {contribution.seq: outcome for contribution, outcome in found.items() if contribution.unit == unit}


def _check_totals(unit: str, before: UnitEntry, new: Manifest, rule: Rule) -> None:
    merged = [m.tokens for step in new.steps for m in step.merged if ContributionId.parse(m.contribution).unit == unit]
    lost = [0 if r.reason in TAKE_BACK else r.tokens for r in new.refused if ContributionId.parse(r.contribution).unit == unit]
    after = new.units[unit]
    rule(
        (after.merged, after.refused, after.tokens, after.lost)
        == (
            before.merged + len(merged),
            before.refused + len(lost),
            min(COUNT_MAX, before.tokens + sum(merged)),
            min(COUNT_MAX, before.lost + sum(lost)),
        ),
        "a unit's totals do not grow by what was decided",
        unit=unit,
    )


def _check_receipts(unit: str, before: UnitEntry, after: UnitEntry, decided: dict[int, str], rule: Rule) -> None:
    rule(after.incarnation >= before.incarnation, "an incarnation went back (I6)", unit=unit)
    if after.incarnation > before.incarnation:
        rule((after.first, after.outcomes) == (0, ""), "a new incarnation starts with receipts", unit=unit)
        return
    rule(after.first >= before.first, "receipts went back (I5)", unit=unit)
    for seq in range(before.first, max(before.first + len(before.outcomes), after.first + len(after.outcomes))):
        expected = decided.get(seq) or before.outcome(seq)
        if seq < after.first:
            rule(expected is not None, "an undecided contribution was dropped (I5)", unit=unit, seq=seq)
        else:
            rule(after.outcome(seq) == expected, "receipts do not say what was decided (I5)", unit=unit, seq=seq)
