"""The inner learning rate: never 0, highest after the warm-up, lowest at the end."""

from __future__ import annotations

import math

import pytest

from workers.schedule import lr_at
from workers.settings import TrainSettings

SETTINGS = TrainSettings(lr=1.0, min_lr_fraction=0.1, warmup_fraction=0.2)


@pytest.mark.parametrize(
    ("progress", "lr"),
    [
        (-1.0, 0.1),
        (0.0, 0.1),
        (0.1, 0.55),
        (0.2, 1.0),
        (0.4, 0.1 + 0.9 * (1 + math.cos(math.pi / 4)) / 2),
        (0.6, 0.55),
        (1.0, 0.1),
        (7.0, 0.1),
    ],
)
def test_values(progress: float, lr: float) -> None:
    assert lr_at(progress, SETTINGS) == pytest.approx(lr, rel=1e-12)


def test_without_warmup_it_starts_at_the_top() -> None:
    assert lr_at(0.0, TrainSettings(lr=0.3, warmup_fraction=0.0)) == pytest.approx(0.3)


def test_never_zero_rises_then_falls() -> None:
    values = [lr_at(step / 1000, SETTINGS) for step in range(1001)]
    assert min(values) == pytest.approx(0.1)
    assert values[:201] == sorted(values[:201])
    assert values[200:] == sorted(values[200:], reverse=True)


def test_a_run_without_a_target_keeps_its_learning_rate() -> None:
    assert lr_at(None, TrainSettings(lr=0.3)) == 0.3
