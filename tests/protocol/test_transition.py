"""What may follow a head: good manifests pass, and each single thing that is broken in one is refused by the rule that it breaks (format §7.5)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from aggregator.outer_step import DISCOVER_EVERY_S, Aggregator
from ps_diloco.config import RunSettings
from ps_diloco.errors import FormatError, InvariantViolation
from ps_diloco.ids import ContributionId
from ps_diloco.records import Config, Manifest, Merged, Parent, Refused, Stored, UnitEntry, encode
from ps_diloco.run import OpenRun
from ps_diloco.store import MemoryStore
from ps_diloco.transition import check_transition
from tests.aggregator.bench import FakeClock, announce, changed, fake_env, publish, tiny_run

Change = Callable[[Manifest], Manifest]


def make_history() -> tuple[OpenRun, list[Stored[Manifest]]]:
    """Two fragments. Version 1 lists, 2 steps fragment 0, 3 steps both and refuses one, 4 refuses only, 5 lists an incarnation and a unit."""
    clock = FakeClock()
    run = tiny_run(MemoryStore(), env=fake_env(clock=clock), fragments=2, pull={"anchor_every": 2})
    for unit in "ab":
        announce(run, unit)
    aggregator = Aggregator(run)
    history = [run.log.find_head(), aggregator.take_pass().head]

    def take() -> None:
        history.append(aggregator.take_pass(force="once").head)

    publish(run, "a", 0, [1.0] * 4)
    take()
    publish(run, "a", 1, [2.0] * 4)
    publish(run, "a", 2, [1.0] * 3, fragment=1)
    publish(run, "b", 0, [3.0] * 4, edit=changed(codec="zip9"))
    publish(run, "b", 1, [3.0] * 3, fragment=1, tokens=50)
    take()
    publish(run, "b", 2, [3.0] * 4, edit=changed(layout_hash="e" * 64))
    take()
    publish(run, "a", 3, [1.0] * 3, fragment=1)
    announce(run, "a", incarnation=1)
    announce(run, "c")
    clock.now_s += DISCOVER_EVERY_S
    take()
    return run, history


RUN, HISTORY = make_history()
STEPPED, FENCED = 3, 5
"""Versions that most mutations begin with."""


def check(version: int, change: Change = lambda manifest: manifest, *, head: Change | None = None) -> None:
    before, after = HISTORY[version - 1], HISTORY[version].record
    if head is not None:
        before = Stored(head(before.record), before.sha256)
    check_transition(before, change(after), RUN.layout)


@pytest.mark.parametrize("version", range(1, len(HISTORY)))
def test_what_the_aggregator_writes_may_follow(version: int) -> None:
    check(version)


def test_a_final_manifest_may_follow_an_open_one() -> None:
    check(STEPPED, lambda m: m.model_copy(update={"final": True}))


def put(**changes: Any) -> Change:
    return lambda manifest: manifest.model_copy(update=changes)


def of_parent(**changes: Any) -> Change:
    def change(manifest: Manifest) -> Manifest:
        assert manifest.parent is not None
        return manifest.model_copy(update={"parent": manifest.parent.model_copy(update=changes)})

    return change


def of_fragment(index: int, **changes: Any) -> Change:
    def change(manifest: Manifest) -> Manifest:
        entries = list(manifest.fragments)
        entries[index] = entries[index].model_copy(update=changes)
        return manifest.model_copy(update={"fragments": tuple(entries)})

    return change


def of_step(index: int, **changes: Any) -> Change:
    def change(manifest: Manifest) -> Manifest:
        steps = list(manifest.steps)
        steps[index] = steps[index].model_copy(update=changes)
        return manifest.model_copy(update={"steps": tuple(steps)})

    return change


def of_unit(name: str, **changes: Any) -> Change:
    return lambda m: m.model_copy(update={"units": {**m.units, name: m.units[name].model_copy(update=changes)}})


def without_unit(name: str) -> Change:
    return lambda m: m.model_copy(update={"units": {unit: entry for unit, entry in m.units.items() if unit != name}})


def with_unit(name: str, **changes: Any) -> Change:
    new = UnitEntry(incarnation=0, region="home", first=0, outcomes="", tries={}, bases={}, tokens=0, merged=0, refused=0, lost=0)
    return lambda m: m.model_copy(update={"units": {**m.units, name: new.model_copy(update=changes)}})


def all_of(*changes: Change) -> Change:
    def change(manifest: Manifest) -> Manifest:
        for one in changes:
            manifest = one(manifest)
        return manifest

    return change


ENTRY = HISTORY[STEPPED].record.fragments[0]
OLDER = HISTORY[STEPPED - 1].record
STEP = HISTORY[STEPPED].record.steps[0]
DELTA = ENTRY.deltas[0].model_copy(update={"sha256": "e" * 64})
OTHER_ANCHOR = OLDER.fragments[0].anchor.model_copy(update={"objects": OLDER.fragments[0].anchor.objects[:1]})


assert ENTRY.state is not None
OTHER_STATE = ENTRY.state.model_copy(update={"object": ENTRY.state.object.model_copy(update={"sha256": "e" * 64})})


def merged(name: ContributionId) -> Merged:
    return STEP.merged[0].model_copy(update={"contribution": str(name)})


def instead(name: ContributionId) -> Change:
    return of_step(0, merged=(merged(name),))


def refusing(*names: ContributionId) -> Change:
    refusals = tuple(Refused(contribution=str(name), fragment=0, tokens=0, reason="stale", detail="") for name in names)
    return lambda m: m.model_copy(update={"refused": (*m.refused, *refusals)})


A = HISTORY[STEPPED].record.units["a"]
BROKEN: dict[str, tuple[str, int, Change]] = {
    "no parent": ("I4", STEPPED, put(parent=None)),
    "another parent hash": ("I4", STEPPED, of_parent(sha256="e" * 64)),
    "another parent version": ("I4", STEPPED, of_parent(version=STEPPED)),
    "another parent timeline": ("I4", STEPPED, of_parent(timeline=1)),
    "a version left out": ("I1", STEPPED, put(version=STEPPED + 1)),
    "the same version": ("I1", STEPPED, put(version=STEPPED - 1)),
    "another timeline": ("I1", STEPPED, put(timeline=1)),
    "another run": ("another run", STEPPED, put(run_id="f" * 32)),
    "a config that goes back": ("config", STEPPED, put(config=-1)),
    "a fragment left out": ("number of fragments", STEPPED, put(fragments=HISTORY[STEPPED].record.fragments[:1])),
    "a fragment that changes without a step": ("without a step", 4, of_fragment(0, tokens=7.0)),
    "a fragment hash that changes without a step": ("without a step", 4, of_fragment(1, sha256="e" * 64)),
    "a state that goes back without a step": ("without a step", 4, of_fragment(0, state=None)),
    "a state that changes without a step": ("without a step", 4, of_fragment(0, state=OTHER_STATE)),
    "a state newer than its fragment": ("newer than its fragment", 4, of_fragment(1, state=HISTORY[4].record.fragments[0].state)),
    "a step without its fragment": ("without a step", STEPPED, lambda m: put(steps=m.steps[1:])(m)),
    "a step of no fragment": ("does not exist", STEPPED, lambda m: put(steps=(*m.steps, STEP.model_copy(update={"fragment": 2})))(m)),
    "a fragment that steps twice": ("steps twice", STEPPED, lambda m: put(steps=(*m.steps, STEP))(m)),
    "a step by two": ("one fragment version", STEPPED, of_step(0, to=3)),
    "a fragment that does not move in a step": ("one fragment version", STEPPED, of_fragment(0, fragment_version=1)),
    "a chain with a gap": ("gap", STEPPED, of_fragment(0, deltas=ENTRY.deltas[1:], anchor=OLDER.fragments[0].anchor)),
    "a chain without its end": ("gap", STEPPED, of_fragment(0, deltas=ENTRY.deltas[:-1])),
    "a hash that is not the last delta's": ("hashes", STEPPED, of_fragment(0, sha256="e" * 64)),
    "an older delta that changes": ("older delta", STEPPED, of_fragment(0, deltas=(DELTA, *ENTRY.deltas[1:]))),
    "an older anchor that changes": ("older anchor", 2, of_fragment(0, anchor=OTHER_ANCHOR)),
    "an object of another fragment": ("another fragment's", STEPPED, of_fragment(0, state=HISTORY[STEPPED].record.fragments[1].state)),
    "fragment tokens that grow too much": ("fragment's tokens", STEPPED, of_fragment(0, tokens=ENTRY.tokens + 1)),
    "fragment tokens that stay": ("fragment's tokens", STEPPED, of_fragment(0, tokens=OLDER.fragments[0].tokens)),
    "run tokens that stay": ("run's tokens", STEPPED, put(tokens=OLDER.tokens)),
    "run tokens that grow without a step": ("run's tokens", 4, lambda m: put(tokens=m.tokens + 1)(m)),
    "a contribution merged again": ("I2", STEPPED, instead(ContributionId(0, "a", 0, 0))),
    "a contribution refused after it was merged": ("I2", STEPPED, refusing(ContributionId(0, "a", 0, 0))),
    "a contribution merged and refused": ("twice", STEPPED, refusing(ContributionId(0, "a", 0, 1))),
    "a contribution merged twice in one step": (
        "twice",
        STEPPED,
        all_of(
            of_step(0, merged=(*STEP.merged, *STEP.merged)),
            of_fragment(0, tokens=ENTRY.tokens + 100),
            lambda m: put(tokens=m.tokens + 4 / 7 * 100)(m),
        ),
    ),
    "a contribution of another timeline": ("another timeline", STEPPED, instead(ContributionId(1, "a", 0, 1))),
    "a contribution of an unlisted unit": ("I6", STEPPED, instead(ContributionId(0, "z", 0, 1))),
    "a contribution of an incarnation to come": ("I6", STEPPED, instead(ContributionId(0, "a", 1, 1))),
    "a refusal of an unlisted incarnation": ("I6", STEPPED, refusing(ContributionId(0, "a", 3, 0))),
    "a unit that disappears": ("disappeared", STEPPED, without_unit("b")),
    "an incarnation that goes back": ("went back", FENCED, of_unit("a", incarnation=-1)),
    "a new incarnation with receipts": ("starts with receipts", FENCED, of_unit("a", outcomes="m")),
    "a new incarnation that begins later": ("starts with receipts", FENCED, of_unit("a", first=1)),
    "a new unit with receipts": ("starts with receipts", FENCED, of_unit("c", outcomes="m")),
    "a new unit with receipts before its first": ("starts with receipts", 4, with_unit("z", first=9)),
    "a merge without a receipt": ("receipts", STEPPED, of_unit("a", outcomes="m.m")),
    "a merge with a refusal as receipt": ("receipts", STEPPED, of_unit("a", outcomes="mcm")),
    "a refusal with another reason": ("receipts", STEPPED, of_unit("b", outcomes="am")),
    "a receipt for nothing": ("receipts", STEPPED, of_unit("a", outcomes="mmmm")),
    "an outcome that changes": ("receipts", STEPPED, of_unit("a", outcomes="cmm")),
    "an outcome that is taken back": ("receipts", STEPPED, of_unit("a", outcomes=".mm")),
    "receipts that are dropped": ("dropped", STEPPED, of_unit("a", first=9, outcomes="")),
    "a unit's tokens that grow without a merge": ("totals", 4, of_unit("a", tokens=A.tokens + 1)),
    "a unit's merges that do not grow": ("totals", STEPPED, of_unit("a", merged=1)),
    "a unit's refusals that do not grow": ("totals", STEPPED, of_unit("b", refused=0)),
    "a unit's lost tokens that go back": ("totals", STEPPED, of_unit("b", lost=0)),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_manifest_with_one_broken_thing_may_not_follow(name: str) -> None:
    rule, version, change = BROKEN[name]
    with pytest.raises((InvariantViolation, FormatError), match=rule):
        check(version, change)


def test_nothing_follows_a_final_manifest() -> None:
    with pytest.raises(InvariantViolation, match="nothing follows"):
        check(STEPPED, head=put(final=True))


def test_receipts_that_went_back_are_refused() -> None:
    with pytest.raises(InvariantViolation, match="went back"):
        check(4, head=of_unit("a", first=9, outcomes=""))


def test_a_refusal_tells_the_version_and_the_place() -> None:
    with pytest.raises(InvariantViolation) as caught:
        check(STEPPED, of_fragment(1, tokens=1.0))
    assert (caught.value.facts["version"], caught.value.facts["fragment"]) == (STEPPED, 1)


def test_a_parent_of_the_right_numbers_and_hash_is_what_the_aggregator_writes() -> None:
    before, after = HISTORY[2], HISTORY[3].record
    assert after.parent == Parent(timeline=0, version=before.record.version, sha256=before.sha256)


def test_a_config_number_may_rise() -> None:
    record = Config(run_id=RUN.run_id, n=1, attempt="0" * 16, reason="", created_at="", settings=RunSettings())
    assert encode(record)
    check(STEPPED, put(config=1))


def test_outer_state_may_be_saved_later_than_its_step() -> None:
    saved = HISTORY[4].record.fragments[0].state
    assert saved is not None and saved.fragment_version == 2
    older = HISTORY[2].record.fragments[0].state
    assert older is not None and older.fragment_version == 1
    for before in (None, older):
        check(4, of_fragment(0, state=saved), head=of_fragment(0, state=before))
