"""The cost model of format §11, held to exactly: requests as a store counts them."""

from __future__ import annotations

import pytest

from benchmarks.requests import (
    Counted,
    Requests,
    Scene,
    anchor_objects,
    count_following,
    count_idle_unit,
    count_publishing,
    march,
)
from ps_diloco.layout import FragmentSize
from ps_diloco.shard import CHUNK


def same(counted: Counted) -> None:
    assert counted.found == counted.model, counted.what


@pytest.mark.parametrize("units", [1, 5])
def test_an_idle_pass_asks_for_the_next_manifest_and_each_units_next_record(units: int) -> None:
    scene = Scene(units=units)
    same(scene.idle())
    same(scene.idle())


def test_discovery_lists_once_and_asks_for_each_units_next_incarnation_and_the_next_settings() -> None:
    same(Scene(units=3).discover())


@pytest.mark.parametrize(("fragments", "each"), [(1, 1), (1, 3), (2, 3)])
def test_a_merge_reads_each_contribution_once_and_writes_what_it_made(fragments: int, each: int) -> None:
    scene = Scene(units=3, fragments=2)
    same(scene.merge(fragments, each))
    same(scene.merge(fragments, each, hint=True))
    same(scene.idle())


@pytest.mark.parametrize("state_every", [1, 3])
def test_anchors_and_outer_state_are_written_every_so_many_steps(state_every: int) -> None:
    scene = Scene(units=1, pull={"anchor_every": 3, "state_every": state_every})
    for _ in range(7):
        same(scene.merge(1, 1))


def test_an_anchor_is_a_group_and_for_each_array_its_description_and_chunks() -> None:
    assert anchor_objects(FragmentSize(elements=1, floats=0, ints=0, frozen=0)) == 3
    assert anchor_objects(FragmentSize(elements=2 * CHUNK + 1, floats=1, ints=1, frozen=0)) == 1 + 4 + 2 + 2


@pytest.mark.parametrize(("versions", "fragments"), [(1, 1), (1, 2), (3, 2)])
def test_following_costs_hint_manifest_and_deltas(versions: int, fragments: int) -> None:
    same(count_following(Scene(units=1, fragments=2), versions, fragments))


def test_an_idle_unit_polls_the_hint_and_every_tenth_time_the_next_number() -> None:
    same(count_idle_unit(Scene(units=1), polls=60, heartbeats=12))


def test_publishing_is_two_puts() -> None:
    same(count_publishing(3, 256))


def test_a_merge_costs_the_same_at_any_version() -> None:
    early, full, late = march([30, 90, 270])
    assert early.requests == full.requests == late.requests != Requests()
    assert late.bytes_in == pytest.approx(full.bytes_in, rel=0.02)  # numbers in records are a digit longer
    assert late.bytes_out == pytest.approx(full.bytes_out, rel=0.02)
