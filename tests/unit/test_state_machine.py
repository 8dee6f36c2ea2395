"""Any order of cuts, decisions, answers and other units' steps (format §6.1, I10, I11), against a model in float64 that knows only what work was done."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test

from ps_diloco.records import OUTCOME_CHAR, TAKE_BACK
from ps_diloco.unit.state import UNDECIDED_PER_FRAGMENT, Correction, FragmentState, Pending
from tests.unit.fragments import base_of, entry_of, payload_of, value_of

ELEMENTS = 5
REASONS = sorted(set(OUTCOME_CHAR) - {"merged"})


@dataclass
class Sent:
    """What the model knows of a cut: the work in it that is part of the local parameters, and its tokens."""

    pending: Pending
    work: torch.Tensor
    tokens: int


class Fragment(RuleBasedStateMachine):
    @initialize(codec=st.sampled_from(["none", "int4", "int8"]), decay=st.sampled_from([0.0, 0.5, 1.0]), seed=st.integers(0, 2**32))
    def begin(self, codec: str, decay: float, seed: int) -> None:
        self.random = torch.Generator().manual_seed(seed)
        self.codec, self.decay = codec, decay
        self.world = self._noise(1.0)
        self.theta = self.world.float()
        self.version = self.seq = 0
        self.state = FragmentState.begin(0, (entry_of(ELEMENTS),), value_of(self.world), base_of(0), codec=codec, decay=decay)
        self.outcomes: dict[int, str] = {}
        # the model
        self.fresh = torch.zeros(ELEMENTS, dtype=torch.float64)
        self.returned = torch.zeros(ELEMENTS, dtype=torch.float64)
        self.sent: list[Sent] = []
        self.promised: torch.Tensor | None = None
        self.merged = torch.zeros(ELEMENTS, dtype=torch.float64)
        self.produced = torch.zeros(ELEMENTS, dtype=torch.float64)
        self.fresh_tokens = self.returned_tokens = 0
        self.made_tokens = self.merged_tokens = self.lost_tokens = 0
        self.resent = self.taken_back = 0
        self.discarded_anything = False
        self.correction: Correction | None = None

    def _noise(self, size: float) -> torch.Tensor:
        return torch.randn(ELEMENTS, generator=self.random).double() * size

    @rule(size=st.sampled_from([1e-3, 0.1, 1.0]), tokens=st.integers(1, 100))
    def train(self, size: float, tokens: int) -> None:
        before = self.theta.clone()
        self.theta.add_(self._noise(size).float())
        self.fresh += self.theta.double() - before.double()
        self.fresh_tokens += tokens
        self.made_tokens += tokens

    @precondition(lambda self: len(self.state.undecided) < UNDECIDED_PER_FRAGMENT and self.fresh_tokens)
    @rule()
    def cut(self) -> None:
        pending = self.state.cut(value_of(self.theta), tokens=self.fresh_tokens, steps=1, inner_steps=0, loss=None)
        self.produced -= self.fresh
        assert pending.tokens == self.fresh_tokens + self.returned_tokens
        self.resent += pending.resent
        self.sent.append(Sent(pending, self.fresh + self.returned, pending.tokens))
        self.fresh, self.fresh_tokens = torch.zeros_like(self.fresh), 0
        self.returned, self.returned_tokens = torch.zeros_like(self.returned), 0

    @precondition(lambda self: any(sent.pending.seq is None for sent in self.sent))
    @rule()
    def number(self) -> None:
        next(sent for sent in self.sent if sent.pending.seq is None).pending.seq = self.seq
        self.seq += 1

    def _undecided(self) -> Pending | None:
        """The oldest that is published and not decided: decisions are in order of seq (I5)."""
        return next((s.pending for s in self.sent if s.pending.seq is not None and s.pending.seq not in self.outcomes), None)

    @precondition(lambda self: self._undecided() is not None)
    @rule(outcome=st.sampled_from(["merged"] * len(REASONS) + REASONS))
    def decide(self, outcome: str) -> None:
        pending = self._undecided()
        assert pending is not None and pending.seq is not None
        self.outcomes[pending.seq] = outcome
        if outcome == "merged":
            payload = payload_of(pending).double()
            self.world -= payload
            self.merged += payload
            self.version += 1

    @rule(size=st.sampled_from([1e-3, 1.0]))
    def others(self, size: float) -> None:
        self.world += self._noise(size)
        self.version += 1

    @precondition(lambda self: self.correction is None)
    @rule()
    def settle(self) -> None:
        decided = [s for s in self.sent if s.pending.seq is not None and s.pending.seq in self.outcomes]
        news = bool(decided) or base_of(self.version) != self.state.held
        self.correction = self.state.settle(self.outcomes.get, value_of(self.world), base_of(self.version))
        assert (self.correction is not None) == news
        self.sent = [s for s in self.sent if s not in decided]
        discard = False
        for sent in decided:
            assert sent.pending.seq is not None
            outcome = self.outcomes[sent.pending.seq]
            if outcome == "merged":
                self.merged_tokens += sent.tokens
            elif outcome in TAKE_BACK:
                self.taken_back += 1
                self.returned += sent.work
                self.returned_tokens += sent.tokens
            else:
                self.lost_tokens += sent.tokens
                discard = self.discarded_anything = True
        if self.correction is not None:
            assert self.correction.replaces == discard
            self.promised = self.world.clone()
        if discard:
            self.lost_tokens += self.returned_tokens
            self.returned, self.returned_tokens = torch.zeros_like(self.returned), 0

    @precondition(lambda self: self.correction is not None)
    @rule()
    def adopt(self) -> None:
        correction, self.correction = self.correction, None
        assert correction is not None and self.promised is not None
        if correction.add_F is not None:
            self.theta.add_(correction.add_F)
            self.state.adopted()
        else:
            before = value_of(self.theta)
            self.theta = correction.value.params.clone()
            self.state.adopted(before, self.fresh_tokens)
            self.produced -= self.fresh
            self.lost_tokens += self.fresh_tokens
            self.fresh, self.fresh_tokens = torch.zeros_like(self.fresh), 0
            for sent in self.sent:
                sent.work = torch.zeros_like(sent.work)
        # I11: local = global + own work that is not merged
        own = self.fresh + self.returned + sum((s.work for s in self.sent), torch.zeros_like(self.fresh))
        assert torch.allclose(self.theta.double(), self.promised + own, rtol=1e-5, atol=2e-5)

    @invariant()
    def the_account_balances(self) -> None:
        account = self.state.account
        assert abs(self.state.balance()) < 1e-3
        assert account.taken_back == self.taken_back and self.resent <= self.taken_back
        assert abs(account.produced - float(self.produced.sum())) < 1e-3
        assert len(self.state.undecided) == len(self.sent) <= UNDECIDED_PER_FRAGMENT

    @invariant()
    def no_token_is_lost_from_sight(self) -> None:
        assert self.state.account.lost_tokens == self.lost_tokens
        on_the_way = sum(sent.tokens for sent in self.sent) + self.returned_tokens
        assert self.state.unmerged_tokens == on_the_way
        assert self.made_tokens == self.merged_tokens + on_the_way + self.fresh_tokens + self.lost_tokens

    @invariant()
    def nothing_produced_is_lost_from_sight(self) -> None:
        """Element by element, while nothing decays and nothing was discarded: produced = merged + undecided + taken back + residual."""
        if self.discarded_anything or (self.decay != 1.0 and self.codec != "none"):
            return
        unseen = [
            payload_of(s.pending).double() for s in self.sent if s.pending.seq is None or self.outcomes.get(s.pending.seq) != "merged"
        ]
        kept = sum(unseen, self.state.residual.double() + self.merged)
        if self.state.returned is not None:
            kept = kept + self.state.returned.double()
        assert torch.allclose(kept, self.produced, rtol=1e-5, atol=1e-4)


def test_any_interleaving_keeps_local_global_and_account_together() -> None:
    run_state_machine_as_test(
        Fragment, settings=settings(max_examples=150, stateful_step_count=60, deadline=None, derandomize=True, database=None)
    )
