"""The state of one fragment in a unit, exactly (format §6.1). Pure: no I/O, no clock, no threads.

Signs: a displacement is *reference minus local*. At any moment, with f the displacement since the last cut::

    local = reference - f          reference = global - sum(D of undecided contributions) - C          (I11)

so local is always the global value plus the unit's own work that is not merged yet. ``cut`` moves the reference to the snapshot; ``settle`` turns what a
manifest says into a :class:`Correction` that the training thread adds; ``adopted`` moves the reference once it did.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from ps_diloco.arrays import add_to, copy_into, copy_of, empty, pieces, total, zeros
from ps_diloco.fragment import FragmentValue
from ps_diloco.layout import LayoutEntry
from ps_diloco.merge import SumSquares
from ps_diloco.records import TAKE_BACK, Base
from ps_diloco.shard import Section, decode_section, encode_section

UNDECIDED_PER_FRAGMENT = 2


@dataclass(kw_only=True)
class Account:
    """Where a fragment's produced displacement went, as float64 sums over its elements (I10), and its lost tokens."""

    produced: float = 0.0
    merged: float = 0.0
    decayed: float = 0.0
    discarded: float = 0.0
    lost_tokens: int = 0
    taken_back: int = 0
    refused: dict[str, int] = field(default_factory=dict)
    """Reason -> contributions refused for good."""


@dataclass(kw_only=True)
class Pending:
    """A cut that no manifest has decided yet: what is (to be) published, and what is needed to take it back.

    ``displacement`` D [F] is None once a replacement took it out of the local parameters. ``seq`` is given by the outbox before the record is written and
    never changes.
    """

    fragment: int
    section: Section
    floats_B: torch.Tensor
    ints_I: torch.Tensor
    displacement: torch.Tensor | None
    payload_total: float
    tokens: int
    steps: int
    inner_steps: int
    base: Base
    sum_squares: tuple[float, ...]
    loss: float | None
    resent: bool
    seq: int | None = None


@dataclass(frozen=True, kw_only=True)
class Correction:
    """What the training thread does at a step border: add ``add_F`` and adopt the buffers, or (``add_F`` None) replace everything by ``value``."""

    fragment: int
    base: Base
    value: FragmentValue
    add_F: torch.Tensor | None

    @property
    def replaces(self) -> bool:
        return self.add_F is None


@dataclass(kw_only=True)
class FragmentState:
    """One fragment of a unit. One thread; arrays are float32 on the host, [F]."""

    fragment: int
    entries: tuple[LayoutEntry, ...]
    codec: str
    decay: float
    reference: torch.Tensor
    held: Base
    """The fragment version that the local parameters contain."""
    base: Base
    """The version that the work since the last cut started from (of the oldest work carried in it)."""
    residual: torch.Tensor
    returned: torch.Tensor | None = None
    """Payload taken back, to be sent again whole."""
    carry: torch.Tensor | None = None
    """C: displacement of the work taken back."""
    carried_tokens: int = 0
    carried_steps: int = 0
    undecided: list[Pending] = field(default_factory=list)
    correcting: Correction | None = None
    """Handed to the training thread and not reported back yet."""
    account: Account = field(default_factory=Account)

    @staticmethod
    def begin(
        fragment: int, entries: tuple[LayoutEntry, ...], value: FragmentValue, held: Base, *, codec: str, decay: float
    ) -> FragmentState:
        """A unit that has just loaded a global version and has done no work."""
        return FragmentState(
            fragment=fragment,
            entries=entries,
            codec=codec,
            decay=decay,
            reference=copy_of(value.params),
            held=held,
            base=held,
            residual=zeros(value.params.numel()),
        )

    @property
    def unmerged_tokens(self) -> int:
        """Tokens of cuts that are undecided or were taken back."""
        return self.carried_tokens + sum(pending.tokens for pending in self.undecided)

    def kept(self) -> float:
        """Sum of what will be sent later: residual and work taken back."""
        return total(self.residual) + (0.0 if self.returned is None else total(self.returned))

    def balance(self) -> float:
        """produced - (merged + undecided + residual + decayed + discarded): zero but for rounding (I10)."""
        undecided = math.fsum(pending.payload_total for pending in self.undecided)
        return self.account.produced - math.fsum(
            (self.account.merged, undecided, self.kept(), self.account.decayed, self.account.discarded)
        )

    def cut(self, snapshot: FragmentValue, *, tokens: int, steps: int, inner_steps: int, loss: float | None) -> Pending:
        """d = r - snapshot; x = beta e + b + d; q = decode(encode(x)); e <- x - q; D = d + C; r <- snapshot. Keeps the snapshot's buffers, not its ``params``.

        Raises :class:`NonFinite` when the local parameters are NaN or infinite; the state is unchanged then.
        """
        elements = self.reference.numel()
        displacement, wanted = empty(elements), empty(elements)
        produced, before, after = [], [], []
        arrays = (displacement, wanted, self.reference, snapshot.params, self.residual)
        for (start, d_P), (_, x_P), (_, r_P), (_, s_P), (_, e_P) in zip(*map(pieces, arrays), strict=True):
            produced.append(total(torch.sub(r_P, s_P, out=d_P)))
            torch.mul(e_P, self.decay, out=x_P)
            if self.decay != 1.0:
                before.append(total(e_P))
                after.append(total(x_P))
            if self.returned is not None:
                x_P.add_(self.returned[start : start + x_P.numel()])
            x_P.add_(d_P)
        payload_totals: list[float] = []
        squares = SumSquares(self.entries)

        def keep_error(start: int, q_P: torch.Tensor) -> None:
            wanted[start : start + q_P.numel()].sub_(q_P)
            payload_totals.append(total(q_P))
            squares.add(start, q_P)

        section = encode_section("params", self.codec, wanted, each=keep_error)
        self.account.produced += math.fsum(produced)
        self.account.decayed += math.fsum(before) - math.fsum(after)
        self.residual = wanted
        if self.carry is not None:
            add_to(displacement, self.carry)
        pending = Pending(
            fragment=self.fragment,
            section=section,
            floats_B=snapshot.floats,
            ints_I=snapshot.ints,
            displacement=displacement,
            payload_total=math.fsum(payload_totals),
            tokens=tokens + self.carried_tokens,
            steps=steps + self.carried_steps,
            inner_steps=inner_steps,
            base=self.base,
            sum_squares=squares.totals(),
            loss=loss,
            resent=self.returned is not None,
        )
        self.returned = self.carry = None
        self.carried_tokens = self.carried_steps = 0
        copy_into(self.reference, snapshot.params)
        self.base = self.held
        self.undecided.append(pending)
        return pending

    def settle(self, outcome: Callable[[int], str | None], value: FragmentValue, version: Base) -> Correction | None:
        """Take in what a manifest says about this fragment: its value there and the outcome of each seq. Call only while ``correcting`` is None.

        Rebase, c = Theta' - (r + sum D_i + C) over what stays undecided or was taken back: in exact arithmetic (Theta' - Theta) + own merged work, and
        rounding never accumulates. A contribution refused for good leads to a replacement instead.
        """
        decided, discard = self._decide(outcome)
        if not decided and version == self.held:
            return None
        if discard:
            return self.replace(value, version)
        own = [pending.displacement for pending in self.undecided if pending.displacement is not None]
        own += [] if self.carry is None else [self.carry]
        correction = copy_of(self.reference)
        for start, c_P in pieces(correction):
            part = slice(start, start + c_P.numel())
            for displacement in own:
                c_P.add_(displacement[part])
            torch.sub(value.params[part], c_P, out=c_P)
        self.correcting = Correction(fragment=self.fragment, base=version, value=value, add_F=correction)
        return self.correcting

    def _decide(self, outcome: Callable[[int], str | None]) -> tuple[bool, bool]:
        """Take in receipts; (whether there were any, whether work was refused for good)."""
        decided = discard = False
        for pending in list(self.undecided):
            result = None if pending.seq is None else outcome(pending.seq)
            if result is None:
                continue
            decided = True
            self.undecided.remove(pending)
            if result == "merged":
                self.account.merged += pending.payload_total
            elif result in TAKE_BACK:
                self._take_back(pending)
            else:
                self.account.discarded += pending.payload_total
                self.account.lost_tokens += pending.tokens
                self.account.refused[result] = self.account.refused.get(result, 0) + 1
                discard = True
        return decided, discard

    def replace(self, value: FragmentValue, version: Base) -> Correction:
        """Give up all work that is not on its way: residual, work taken back, and what was done since the last cut."""
        self.account.discarded += self.kept()
        self.account.lost_tokens += self.carried_tokens
        self.residual = zeros(self.residual.numel())
        self.returned = self.carry = None
        self.carried_tokens = self.carried_steps = 0
        self.correcting = Correction(fragment=self.fragment, base=version, value=value, add_F=None)
        return self.correcting

    def adopted(self, before: FragmentValue | None = None, lost_tokens: int = 0) -> None:
        """The training thread has applied ``correcting``. For a replacement: ``before`` is the snapshot it took first, and the tokens that were lost."""
        correction = self.correcting
        assert correction is not None
        self.correcting = None
        self.held = correction.base
        if correction.add_F is not None:
            add_to(self.reference, correction.add_F)
            return
        self.leave(before, lost_tokens)
        self.reference = copy_of(correction.value.params)
        self.base = self.held
        for pending in self.undecided:
            pending.displacement = None

    def finish(self, outcome: Callable[[int], str | None]) -> None:
        """The run is final: what the last manifest did not merge never will be, and is booked as discarded (format §7.7)."""
        self._decide(outcome)
        self.account.discarded += math.fsum(pending.payload_total for pending in self.undecided) + self.kept()
        self.account.lost_tokens += self.unmerged_tokens
        self.undecided.clear()
        self.residual = zeros(self.residual.numel())
        self.returned = self.carry = None
        self.carried_tokens = self.carried_steps = 0

    def leave(self, before: FragmentValue | None, lost_tokens: int) -> None:
        """Book what was done since the last cut as discarded: nothing of it will be sent."""
        if before is not None:
            fresh = total(self.reference - before.params)
            self.account.produced += fresh
            self.account.discarded += fresh
        self.account.lost_tokens += lost_tokens

    def unsent_error(self) -> torch.Tensor:
        """A new array: residual and work taken back."""
        kept = copy_of(self.residual)
        if self.returned is not None:
            add_to(kept, self.returned)
        return kept

    def unsent(self) -> torch.Tensor:
        """A new array: all that a later incarnation would have to send, i.e. residual, work taken back, and payloads whose record was never begun."""
        kept = self.unsent_error()
        for pending in self.undecided:
            if pending.seq is None:
                kept.add_(decode_section(pending.section))
        return kept

    def restore_residual(self, residual: torch.Tensor) -> None:
        """Add the residual that an earlier incarnation saved; it counts as produced by this one."""
        self.account.produced += total(residual)
        add_to(self.residual, residual)

    def _take_back(self, pending: Pending) -> None:
        """b <- b + q; C <- C + D; tokens, steps and the oldest base carry over."""
        payload = decode_section(pending.section)
        self.returned = payload if self.returned is None else self.returned.add_(payload)
        if pending.displacement is not None:
            self.carry = pending.displacement if self.carry is None else self.carry.add_(pending.displacement)
        self.carried_tokens += pending.tokens
        self.carried_steps += pending.steps
        self.account.taken_back += 1
        if pending.base.fragment_version < self.base.fragment_version:
            self.base = pending.base
