"""One pass of the aggregator from end to end: the numbers it makes and the manifest it writes (format §5.7, §6)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest

from aggregator.outer_step import Aggregator
from ps_diloco import keys
from ps_diloco.checkpoint import read_fragment
from ps_diloco.fragment import FragmentValue
from tests.aggregator.bench import (
    EXACT_PULL,
    START,
    base_of,
    listed,
    params,
    publish,
    seen_by,
    values,
    walk,
)

ROOT_HALF = 2**-0.5


@dataclass
class Reference:
    """A fragment in float64: the formulas of format §6.2 and §6.3, written down a second time."""

    theta: list[float]
    lr: float
    momentum: float
    m: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        self.m = np.zeros(len(self.theta))

    def step(self, *weighed: tuple[float, Sequence[float]]) -> np.ndarray:
        """``weighed``: (coefficient, delta) of each contribution."""
        gradient = sum((coefficient * np.array(delta) for coefficient, delta in weighed), np.zeros(len(self.theta)))
        self.m = self.momentum * self.m + gradient
        self.theta = list(np.array(self.theta) - self.lr * (self.momentum * self.m + gradient))
        return gradient


def test_two_steps_of_one_fragment_are_the_merge_and_the_nesterov_step_worked_out_by_hand() -> None:
    run, aggregator = listed("a", "b", outer={"lr": 0.5, "momentum": 0.8}, merge={"weight_cap": 100.0}, pull=EXACT_PULL)
    reference = Reference([*START["a"], *START["b"]], lr=0.5, momentum=0.8)
    zero = base_of(run.log.find_head().record, 0)
    one, two = [1.0, 0.0, -1.0, 0.5, 0.25, 0.0, 2.0], [0.0, 4.0, 1.0, 0.0, -0.25, 8.0, 0.0]

    publish(run, "b", 0, two, tokens=300, steps=10, floats=[0.0, 0.0], ints=[4])
    publish(run, "a", 0, one, tokens=100, steps=10, floats=[4.0, 8.0], ints=[9])
    first = aggregator.take_pass().head.record
    (step,) = first.steps
    assert (step.fragment, step.to, step.closed, step.mass, step.round_tokens) == (0, 1, "everyone", 1.0, 400.0)
    # w = tokens^2 / steps: 1000 and 9000
    assert [(m.contribution[8], m.weight, m.coefficient) for m in step.merged] == [
        ("a", 1000.0, np.float32(0.1)),
        ("b", 9000.0, np.float32(0.9)),
    ]
    gradient = reference.step((0.1, one), (0.9, two))
    assert params(run) == pytest.approx(reference.theta, rel=1e-6, abs=1e-7)
    assert step.gradient_norm == pytest.approx(float(np.linalg.norm(gradient)), rel=1e-6)
    assert step.update_norm == pytest.approx(0.5 * 1.8 * float(np.linalg.norm(gradient)), rel=1e-6)
    value = values(run)[0]
    assert value.floats.tolist() == pytest.approx([0.4, 0.8], rel=1e-6)  # mass 1: the weighted mean alone
    assert value.ints.tolist() == [9]

    publish(run, "a", 1, two, tokens=100, floats=[0.4, 0.8])
    publish(run, "b", 1, one, tokens=100, floats=[0.4, 0.8])
    second = aggregator.take_pass().head.record
    assert (second.steps[0].mass, second.steps[0].round_tokens) == (1.0, 200.0)
    reference.step((0.5, two), (0.5, one))
    assert params(run) == pytest.approx(reference.theta, rel=1e-6, abs=1e-7)

    # two steps stale, and each was a whole round: one of them is free
    publish(run, "a", 2, two, tokens=50, steps=10, base=zero, floats=[2.4, 0.8], ints=[3])
    third = aggregator.take_pass(force="once").head.record
    (step,) = third.steps
    assert (step.mass, step.round_tokens, step.merged[0].staleness) == (50 / 150, 150.0, 2)
    # its share is 1, whatever its weight; staleness stands in the numerator only
    assert step.merged[0].coefficient == pytest.approx(ROOT_HALF / 3, rel=1e-7)
    reference.step((ROOT_HALF / 3, two))
    assert params(run) == pytest.approx(reference.theta, rel=1e-6, abs=1e-7)
    value = values(run)[0]
    assert value.floats.tolist() == pytest.approx([0.4 + 2.0 / 3, 0.8], rel=1e-6)
    assert value.ints.tolist() == [9]
    assert (third.tokens, third.units["a"].tokens, third.units["b"].tokens) == (650.0, 250, 400)


def test_with_two_fragments_each_steps_with_its_own_work_momentum_and_share_of_the_tokens() -> None:
    run, aggregator = listed("a", "b", fragments=2, outer={"lr": 0.5, "momentum": 0.5}, pull=EXACT_PULL)
    left, right = Reference(START["a"], 0.5, 0.5), Reference(START["b"], 0.5, 0.5)
    publish(run, "a", 0, [1.0, 2.0, 3.0, 4.0], tokens=100)
    publish(run, "a", 1, [1.0, 0.0, 0.0], fragment=1, tokens=70)
    publish(run, "b", 0, [0.0, 1.0, 0.0], fragment=1, tokens=70)
    manifest = aggregator.take_pass(force="once").head.record
    assert [(step.fragment, step.to, len(step.merged), step.mass) for step in manifest.steps] == [(0, 1, 1, 0.5), (1, 1, 2, 1.0)]
    left.step((0.5, [1.0, 2.0, 3.0, 4.0]))
    right.step((0.5, [1.0, 0.0, 0.0]), (0.5, [0.0, 1.0, 0.0]))
    assert params(run, 0) == pytest.approx(left.theta, rel=1e-6)
    assert params(run, 1) == pytest.approx(right.theta, rel=1e-6)
    assert manifest.tokens == pytest.approx(4 / 7 * 100 + 3 / 7 * 140, rel=1e-12)
    assert [entry.tokens for entry in manifest.fragments] == [100.0, 140.0]

    publish(run, "b", 1, [0.0, 0.0, 1.0], fragment=1, tokens=140)
    later = aggregator.take_pass(force="once").head.record
    right.step((140 / 210, [0.0, 0.0, 1.0]))
    assert params(run, 1) == pytest.approx(right.theta, rel=1e-6)
    assert later.fragments[0] == manifest.fragments[0]
    assert later.units["b"].bases == {"1": 1}


def test_one_uncompressed_unit_is_plain_diloco() -> None:
    run, aggregator = listed("a", outer={"lr": 0.7, "momentum": 0.9}, pull=EXACT_PULL)
    reference = Reference([*START["a"], *START["b"]], 0.7, 0.9)
    for seq in range(3):
        delta = [0.1 * (seq + 1)] * 7
        publish(run, "a", seq, delta)
        assert aggregator.take_pass().head.record.steps[0].closed == "everyone"
        reference.step((1.0, delta))
    assert params(run) == pytest.approx(reference.theta, rel=1e-5)


def test_what_a_quantised_update_loses_is_published_later() -> None:
    run, aggregator = listed("a", outer={"lr": 1.0, "momentum": 0.0}, pull={"codec": "int4"})
    target = np.array([*START["a"], *START["b"]])
    delta = [1.0, 0.05, 0.06, -0.07, 0.3, 0.0, -0.9]
    for seq in range(40):
        publish(run, "a", seq, delta)
        aggregator.take_pass()
        target -= np.array(delta, dtype=np.float32)
    step = 1.1 / 7  # the largest possible scale of a block whose values stay below 1.1
    assert np.abs(np.array(params(run)) - target).max() <= step / 2 + 1e-4


def test_the_manifest_says_who_wrote_it_what_came_before_and_where_every_object_is() -> None:
    run, aggregator = listed("a", pull={"state_every": 1})
    parent = run.log.find_head()
    record = publish(run, "a", 0, [1.0] * 7)
    manifest = aggregator.take_pass().head.record
    assert manifest.parent is not None
    assert (manifest.parent.version, manifest.parent.sha256) == (parent.record.version, parent.sha256)
    assert (manifest.timeline, manifest.version, manifest.config, manifest.final) == (0, 2, 0, False)
    assert manifest.fingerprint.software.startswith("ps-diloco")
    entry = manifest.fragments[0]
    (delta,) = entry.deltas
    assert entry.state is not None
    assert (entry.fragment_version, entry.anchor.fragment_version, delta.fragment_version, entry.state.fragment_version) == (1, 0, 1, 1)
    assert keys.parse_fragment_object(delta.object.key) == (0, 0, 1)
    assert delta.sha256 == entry.sha256 == values(run)[0].sha256()
    assert (entry.rounds["a"].tokens, entry.rounds["a"].fragment_version, entry.weights) == (100, 1, (1000.0,))
    assert manifest.steps[0].merged[0].contribution == str(record.id)
    assert (manifest.units["a"].first, manifest.units["a"].outcomes, manifest.units["a"].merged) == (0, "m", 1)


def test_an_anchor_is_written_every_n_steps_and_the_chain_keeps_the_deltas_since_the_one_before() -> None:
    run, aggregator = listed("a", pull={"anchor_every": 3})
    chains = []
    held: dict[int, FragmentValue] = {}
    for seq in range(8):
        publish(run, "a", seq, [0.01 * seq] * 7)
        manifest = aggregator.take_pass().head.record
        entry = manifest.fragments[0]
        chains.append((entry.anchor.fragment_version, [delta.fragment_version for delta in entry.deltas]))
        held[entry.fragment_version] = values(run, manifest)[0]
    assert chains == [
        (0, [1]),
        (0, [1, 2]),
        (3, [1, 2, 3]),
        (3, [1, 2, 3, 4]),
        (3, [1, 2, 3, 4, 5]),
        (6, [4, 5, 6]),
        (6, [4, 5, 6, 7]),
        (6, [4, 5, 6, 7, 8]),
    ]
    for version, value in held.items():
        again = read_fragment(run, manifest.fragments[0], 0, held=(version, value))
        assert again.sha256() == manifest.fragments[0].sha256
    assert len(walk(run)) == 10


def test_another_process_goes_on_with_the_same_bits() -> None:
    ends = []
    for restart in (False, True):
        run, aggregator = listed("a", "b", pull={"anchor_every": 2})
        for seq in range(6):
            publish(run, "a", seq, [0.3 * seq + 0.1] * 7)
            publish(run, "b", seq, [-0.2 * seq] * 7, codec="int4")
            aggregator = Aggregator(seen_by(run, seed=seq + 10)) if restart else aggregator
            aggregator.take_pass()
        ends.append([entry.sha256 for entry in run.log.find_head().record.fragments])
        assert run.log.find_head().record.fragments[0].fragment_version == 6
    assert ends[0] == ends[1]
