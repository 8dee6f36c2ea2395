"""Progress of a run and of a unit's learning rate (format §6.4). Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ps_diloco.layout import Layout


def fragment_share(layout: Layout, fragment: int) -> float:
    """elements_f / N: how much of a token one token merged into this fragment is."""
    return layout.fragments[fragment].elements / layout.elements


def model_tokens(layout: Layout, fragment_tokens: Sequence[float]) -> float:
    """Tokens per fragment as tokens of the whole model."""
    return sum(fragment_share(layout, fragment) * tokens for fragment, tokens in enumerate(fragment_tokens))


@dataclass
class LearningRateProgress:
    """Fraction of the run that is done, as a unit's schedule sees it: in [0, 1], never decreasing within a timeline."""

    target_tokens: int | None
    _highest: float = 0.0

    def update(self, merged_tokens: float, own_unmerged_tokens: float) -> float:
        """``merged_tokens`` from the adopted manifest plus own work on its way. 0 for ever without a target."""
        if self.target_tokens:
            self._highest = max(self._highest, min(1.0, (merged_tokens + own_unmerged_tokens) / self.target_tokens))
        return self._highest

    def new_timeline(self) -> None:
        """A new timeline may lie before the old one's end."""
        self._highest = 0.0


def join_ramp(step: int, warmup_steps: int) -> float:
    """Learning-rate factor of the ``step``-th (from 1) inner step of an incarnation without inner state."""
    return 1.0 if step >= warmup_steps else step / warmup_steps
