"""A run in which contributions simply add up, whatever the order and the number of steps: so the end shows whether each was counted once.

::

    run = scene()                              # three units, five contributions published
    pass_until_idle(Aggregator(run))
    once_each(run)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from aggregator.outer_step import Aggregator
from ps_diloco.ids import ContributionId
from ps_diloco.records import Manifest
from ps_diloco.run import OpenRun
from ps_diloco.store import MemoryStore, Store
from tests.aggregator.bench import ADDITIVE, START, announce, base_of, merged_in, params, publish, tiny_run, walk

Work = Sequence[tuple[str, int, int, Sequence[float]]]
"""(unit, seq, fragment, delta)"""
WORK: Work = [
    ("a", 0, 0, [1.0, 0.0, 0.5, 0.25]),
    ("a", 1, 1, [0.5, 0.5, -1.0]),
    ("b", 0, 1, [2.0, 0.0, 0.0]),
    ("b", 1, 0, [0.0, -3.0, 1.0, 0.0]),
    ("c", 0, 0, [0.125, 0.125, 0.125, 8.0]),
]


def put_out(run: OpenRun, work: Work, **options: Any) -> None:
    zero = run.log.read(0, 0)
    assert zero is not None
    for unit, seq, fragment, delta in work:
        publish(run, unit, seq, delta, fragment=fragment, base=base_of(zero.record, fragment), **options)


def scene(work: Work = WORK, *, store: Store | None = None, **settings: Any) -> OpenRun:
    """Two fragments, three listed units, ``work`` published and not decided."""
    run = tiny_run(store or MemoryStore(), fragments=2, **{**ADDITIVE, **settings})
    for unit in "abc":
        announce(run, unit)
    Aggregator(run).take_pass()
    put_out(run, work)
    return run


def once_each(run: OpenRun, work: Work = WORK, *, known: frozenset[str] = frozenset()) -> list[Manifest]:
    """Walk the log; each contribution was merged exactly once, and the parameters are what an undisturbed sum gives.

    ``known``: hash of a fragment whose values were looked at before.
    """
    history = walk(run, objects=not known)
    assert merged_in(history) == dict.fromkeys((str(ContributionId(0, unit, 0, seq)) for unit, seq, _, _ in work), 1)
    assert history[-1].tokens == pytest.approx(sum([4 / 7, 3 / 7][fragment] * 100 for _, _, fragment, _ in work))
    for fragment, name in enumerate("ab"):
        if history[-1].fragments[fragment].sha256 in known:
            continue
        expected = list(START[name])
        for _, _, where, delta in work:
            if where == fragment:  # lr x tokens / round_tokens
                expected = [theta - 0.5 * 100 / 10_000 * d for theta, d in zip(expected, delta, strict=True)]
        assert params(run, fragment) == pytest.approx(expected, rel=1e-6)
    return history


def pass_until_idle(aggregator: Aggregator) -> list[str]:
    """Passes until nothing is left to do; what each of them did."""
    kinds: list[str] = []
    while not kinds or kinds[-1] not in ("idle", "final"):
        assert len(kinds) < 20, f"no end in sight: {kinds}"
        kinds.append(aggregator.take_pass().kind)
    return kinds
