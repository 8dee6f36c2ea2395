"""The engine thread: events in order, bounded cuts, one correction at a time, fencing (format §6.1, §7.2 step 8)."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from ps_diloco.errors import Fenced, InvariantViolation, NonFinite
from ps_diloco.fragment import FragmentValue
from ps_diloco.records import UNDECIDED_MAX, Stored, UnitEntry
from ps_diloco.shard import decode_section
from ps_diloco.threads import SystemThreads
from ps_diloco.unit.engine import Adopted, Cut, Engine, Left, Residuals, Restart, Save
from ps_diloco.unit.outbox import Identity
from ps_diloco.unit.puller import News, read_news
from ps_diloco.unit.state import Correction, Pending
from tests.unit.scene import Scene, plain_settings, wait_until

WHO = Identity(timeline=0, unit="a", incarnation=1)


class Shelf:
    """In place of an outbox: numbers cuts at once, publishes nothing."""

    def __init__(self) -> None:
        self.pendings: list[Pending] = []
        self.published = 0
        self.queued = 0
        self.accepted = 0

    def put(self, pending: Pending) -> int:
        pending.seq = len(self.pendings)
        self.pendings.append(pending)
        self.queued += 1
        self.accepted += 1
        return pending.seq


class Rig:
    """An engine on made-up news. The value of every fragment in version v is ``level`` everywhere."""

    def __init__(self, fragments: int = 1, *, codec: str = "none") -> None:
        self.scene = Scene(fragments=fragments, codec=codec)
        self.first = read_news(self.scene.run, self.scene.run.log.find_head(), None)
        self.shelf = Shelf()
        self.errors: list[BaseException] = []
        settings = plain_settings(codec=codec)
        layout = self.scene.run.layout
        self.recycled = 0
        self.engine = Engine(
            layout, settings, WHO, self.first, self.shelf, threads=SystemThreads(), on_error=self.errors.append, recycle=self._recycle
        )  # type: ignore[arg-type]
        self.theta = [value.params.clone() for value in self.first.values]
        self.version = 0

    def _recycle(self, snapshot: FragmentValue) -> None:
        """As if the next snapshot were written there at once."""
        self.recycled += 1
        snapshot.params.fill_(float("nan"))

    def news(
        self,
        *,
        outcomes: str = "",
        level: float | None = None,
        incarnation: int = 1,
        first: int = 0,
        final: bool = False,
        listed: bool = True,
    ) -> News:
        self.version += 1
        old = self.first.head.record
        entry = UnitEntry(
            incarnation=incarnation,
            region="home",
            first=first,
            outcomes=outcomes,
            tries={},
            bases={},
            tokens=0,
            merged=0,
            refused=0,
            lost=0,
        )
        values = self.first.values if level is None else tuple(_filled(value, level) for value in self.first.values)
        fragments = tuple(
            fragment.model_copy(update={"fragment_version": self.version, "sha256": value.sha256()})
            for fragment, value in zip(old.fragments, values, strict=True)
        )
        update = {"version": self.version, "fragments": fragments, "units": {"a": entry} if listed else {}, "final": final}
        return News(head=Stored(old.model_copy(update=update), f"{self.version:064d}"), values=values)

    def cut(self, fragment: int = 0, *, work: float = -1.0, tokens: int = 10) -> bool:
        """Work, then cut if that is allowed."""
        self.theta[fragment].add_(work)
        if not self.engine.can_cut(fragment):
            return False
        value = dataclasses.replace(self.first.values[fragment].clone(), params=self.theta[fragment].clone())
        self.engine.post(Cut(fragment=fragment, snapshot=value, tokens=tokens, steps=1, inner_steps=1, loss=None))
        return True

    def settled(self) -> tuple[dict[int, torch.Tensor], int]:
        """Wait until all events so far are handled; the residuals and the number of cuts then."""
        done = threading.Event()
        found: list[tuple[dict[int, torch.Tensor], int]] = []

        def then(residuals: dict[int, torch.Tensor], cuts: int) -> None:
            found.append((residuals, cuts))
            done.set()

        self.engine.post(Save(then=then))
        wait_until(lambda: done.is_set() or bool(self.errors))
        if self.errors:
            raise self.errors[0]
        return found[0]

    def apply(self, corrections: list[Correction]) -> None:
        """As the training thread does."""
        for correction in corrections:
            theta = self.theta[correction.fragment]
            if correction.add_F is not None:
                theta.add_(correction.add_F)
                self.engine.post(Adopted(fragment=correction.fragment))
                continue
            before = dataclasses.replace(self.first.values[correction.fragment].clone(), params=theta.clone())
            theta.copy_(correction.value.params)
            self.engine.post(Adopted(fragment=correction.fragment, before=before, lost_tokens=7))

    @property
    def balanced(self) -> bool:
        return all(abs(balance) < 1e-4 for _, balance in self.engine.accounts)


def _filled(value: FragmentValue, level: float) -> FragmentValue:
    return dataclasses.replace(value.clone(), params=torch.full_like(value.params, level))


@contextmanager
def _running(fragments: int = 1, *, codec: str = "none") -> Iterator[Rig]:
    rig = Rig(fragments, codec=codec)
    rig.engine.start()
    try:
        yield rig
    finally:
        rig.engine.join(30.0)


def test_a_cut_goes_to_the_outbox_and_its_tokens_count_as_unmerged() -> None:
    with _running(3) as rig:
        assert rig.cut(0, tokens=11) and rig.cut(2, tokens=5)
        assert rig.settled()[1] == 2
        assert [pending.fragment for pending in rig.shelf.pendings] == [0, 2]
        assert rig.engine.unmerged_tokens() == [11, 0, 5] and rig.engine.undecided() == 2


def test_every_snapshot_is_given_back_once_nothing_reads_it_any_more() -> None:
    with _running() as rig:
        rig.cut(work=-1.0)
        rig.cut(work=-2.0)
        residuals, _ = rig.settled()
        rig.engine.post(Restart())
        rig.settled()
        rig.apply(rig.engine.take_corrections())
        before = dataclasses.replace(rig.first.values[0].clone(), params=rig.theta[0].clone())
        rig.engine.post(Left(fragment=0, before=before, lost_tokens=0))
        rig.settled()
        assert rig.recycled == 4 and rig.balanced
        sent = [decode_section(pending.section) for pending in rig.shelf.pendings]
        assert [payload.unique().tolist() for payload in sent] == [[1.0], [2.0]] and not residuals[0].any()


def test_a_third_undecided_cut_of_a_fragment_is_not_allowed_until_one_is_decided() -> None:
    with _running(2) as rig:
        assert [rig.cut(0) for _ in range(4)] == [True, True, False, False]
        assert rig.cut(1)
        rig.engine.post(rig.news(outcomes="m"))
        rig.settled()
        assert rig.cut(0) and not rig.cut(0)
        rig.apply(rig.engine.take_corrections())
        rig.engine.post(rig.news(outcomes="mc.m"))
        rig.settled()
        assert rig.engine.undecided() == 1


def test_all_fragments_together_have_at_most_64_undecided_cuts() -> None:
    rig = Rig(3)
    rig.engine._taken = [0] * 64
    allowed = [rig.engine.can_cut(fragment) for fragment in [*range(64)] * 2]
    assert sum(allowed) == UNDECIDED_MAX


def test_a_rebase_keeps_own_work_and_takes_the_others() -> None:
    with _running() as rig:
        start = rig.theta[0].clone()
        rig.cut(work=-1.0)
        rig.cut(work=-2.0)
        rig.theta[0].add_(-4.0)
        rig.engine.post(rig.news(outcomes="m", level=100.0))
        rig.settled()
        (correction,) = rig.engine.take_corrections()
        assert not correction.replaces and rig.engine.take_corrections() == []
        rig.apply([correction])
        rig.settled()
        assert torch.allclose(rig.theta[0], torch.full_like(start, 100.0 - 2.0 - 4.0)) and rig.balanced


def test_news_while_a_correction_is_out_wait_for_its_adoption() -> None:
    with _running() as rig:
        rig.cut(work=-1.0)
        rig.engine.post(rig.news(level=10.0))
        rig.settled()
        out = rig.engine.take_corrections()
        rig.engine.post(rig.news(outcomes="m", level=20.0))
        rig.engine.post(rig.news(outcomes="m", level=30.0))
        rig.settled()
        assert rig.engine.take_corrections() == [] and rig.engine.newest.head.record.version == 3
        rig.apply(out)
        rig.settled()
        assert torch.allclose(rig.theta[0], torch.full_like(rig.theta[0], 10.0 - 1.0))
        rig.apply(rig.engine.take_corrections())
        rig.settled()
        assert torch.allclose(rig.theta[0], torch.full_like(rig.theta[0], 30.0)) and rig.engine.take_corrections() == []


def test_the_same_news_twice_is_one_correction() -> None:
    with _running() as rig:
        news = rig.news(level=10.0)
        rig.engine.post(news)
        rig.settled()
        rig.apply(rig.engine.take_corrections())
        rig.engine.post(news)
        rig.settled()
        assert rig.engine.take_corrections() == []


@pytest.mark.parametrize("outcome", "anobkq")
def test_a_refusal_for_good_replaces_the_fragment_and_frees_its_place(outcome: str) -> None:
    with _running(2) as rig:
        rig.cut(0)
        rig.engine.post(rig.news(outcomes=outcome, level=5.0))
        rig.settled()
        corrections = rig.engine.take_corrections()
        assert [correction.replaces for correction in sorted(corrections, key=lambda c: c.fragment)] == [True, False]
        rig.apply(corrections)
        rig.settled()
        assert rig.engine.undecided() == 0 and rig.engine.unmerged_tokens() == [0, 0]
        account, _ = rig.engine.accounts[0]
        assert account.lost_tokens == 10 + 7 and rig.balanced
        assert torch.equal(rig.theta[0], torch.full_like(rig.theta[0], 5.0))


@pytest.mark.parametrize("outcome", "sxc")
def test_what_is_taken_back_rides_in_the_next_cut(outcome: str) -> None:
    with _running() as rig:
        rig.cut(work=-1.0)
        rig.engine.post(rig.news(outcomes=outcome))
        rig.settled()
        assert rig.engine.unmerged_tokens() == [10] and rig.engine.undecided() == 0
        rig.apply(rig.engine.take_corrections())
        rig.cut(work=-2.0)
        rig.settled()
        assert rig.shelf.pendings[1].tokens == 20 and rig.shelf.pendings[1].resent and rig.balanced


def test_a_saved_residual_includes_what_was_taken_back() -> None:
    """The next incarnation sends it, since its state covers the refused contribution."""
    with _running() as rig:
        rig.cut(work=-3.0)
        rig.engine.post(rig.news(outcomes="x"))
        residuals, cuts = rig.settled()
        assert cuts == 1 and torch.equal(residuals[0], torch.full_like(residuals[0], 3.0))


def test_saved_residuals_are_copies() -> None:
    with _running(codec="int4") as rig:
        rig.theta[0].add_(torch.linspace(-1.0, 1.0, 13))
        rig.cut()
        residuals, _ = rig.settled()
        before = residuals[0].clone()
        rig.engine.post(Residuals(values={0: torch.ones(13)}))
        later, _ = rig.settled()
        assert torch.equal(residuals[0], before) and torch.allclose(later[0], before + 1.0) and rig.balanced


def test_outcomes_of_another_incarnation_are_not_ours() -> None:
    with _running() as rig:
        rig.cut()
        rig.engine.post(rig.news(outcomes="mmm", incarnation=0))
        rig.settled()
        assert rig.engine.undecided() == 1


def test_a_newer_incarnation_fences() -> None:
    with _running() as rig:
        rig.engine.post(rig.news(incarnation=2))
        with pytest.raises(Fenced) as caught:
            rig.settled()
        assert caught.value.exit_code == 4 and caught.value.facts["newest"] == 2


def test_a_receipt_that_is_gone_is_our_own_bug() -> None:
    with _running() as rig:
        rig.cut()
        rig.engine.post(rig.news(outcomes="", first=3))
        with pytest.raises(InvariantViolation):
            rig.settled()


def test_a_model_that_is_not_finite_is_an_error_of_the_unit() -> None:
    with _running() as rig:
        rig.cut(work=float("nan"))
        with pytest.raises(NonFinite):
            rig.settled()


def test_a_restart_replaces_every_fragment_once_also_while_a_correction_is_out() -> None:
    with _running(2) as rig:
        rig.engine.post(rig.news(level=5.0))
        rig.settled()
        out = rig.engine.take_corrections()
        rig.engine.post(Restart())
        rig.settled()
        assert rig.engine.take_corrections() == []  # both fragments wait for their adoption
        rig.apply(out)
        rig.settled()
        again = rig.engine.take_corrections()
        assert sorted((correction.fragment, correction.replaces) for correction in again) == [(0, True), (1, True)]
        rig.apply(again)
        rig.settled()
        assert rig.engine.take_corrections() == [] and rig.balanced
        assert all(torch.equal(theta, torch.full_like(theta, 5.0)) for theta in rig.theta)


def test_a_final_version_is_final_and_is_kept() -> None:
    with _running() as rig:
        assert rig.engine.final is None
        last = rig.news(final=True)
        rig.engine.post(last)
        rig.settled()
        assert rig.engine.final is last and rig.engine.newest is last


def test_queued_events_are_handled_before_the_end() -> None:
    rig = Rig()
    rig.engine.start()
    rig.cut()
    rig.cut()
    rig.engine.join(30.0)
    assert len(rig.shelf.pendings) == 2 and not rig.engine._thread.is_alive()
