"""The inner learning rate as a function of the run's progress (format §6.4 defines progress). Pure."""

from __future__ import annotations

import math

from workers.settings import TrainSettings


def lr_at(progress: float | None, settings: TrainSettings) -> float:
    """Learning rate at ``progress`` in [0, 1]: a linear rise over ``warmup_fraction``, then a cosine down to ``min_lr_fraction`` of ``lr``.

    Never 0: the rise starts from the minimum. None, a run without ``target_tokens``, means ``lr`` throughout. Progress beyond the ends counts
    as the end.
    """
    if progress is None:
        return settings.lr
    progress = min(1.0, max(0.0, progress))
    low, warmup = settings.lr * settings.min_lr_fraction, settings.warmup_fraction
    if progress < warmup:
        return low + (settings.lr - low) * progress / warmup
    done = (progress - warmup) / (1.0 - warmup)
    return low + (settings.lr - low) * 0.5 * (1.0 + math.cos(math.pi * done))
