"""Settings of the training program survive run.json, and say what is wrong."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ps_diloco.config import parse_settings
from ps_diloco.errors import ConfigError
from workers.settings import ModelSettings, ProgramSettings


def test_defaults_survive_run_json() -> None:
    program = ProgramSettings()
    text = json.dumps(program.model_dump(mode="json"))
    assert parse_settings(ProgramSettings, json.loads(text), source="run.json") == program


def test_changed_values_survive_run_json() -> None:
    values = {
        "model": {"layers": 2, "tied_embedding": False},
        "data": {"suffixes": [".c", ".h"]},
        "train": {"betas": [0.8, 0.9], "threads": 1},
    }
    program = parse_settings(ProgramSettings, values, source="run.toml")
    assert program.model.layers == 2
    assert program.data.suffixes == (".c", ".h")
    assert program.train.betas == (0.8, 0.9)
    assert parse_settings(ProgramSettings, json.loads(json.dumps(program.model_dump(mode="json"))), source="run.json") == program


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"model": {"layer": 2}}, "did you mean 'layers'?"),
        ({"model": {"vocab": 100}}, "'model.vocab' = 100"),
        ({"model": {"heads": 3}}, "a multiple of twice the heads: width=128 heads=3"),
        ({"data": {"held_out": 0.0}}, "'data.held_out' = 0.0"),
        ({"data": {"suffixes": []}}, "'data.suffixes' = ()"),
        ({"train": {"lr": 0}}, "'train.lr' = 0"),
        ({"train": {"min_lr_fraction": 0.0}}, "'train.min_lr_fraction' = 0.0"),
        ({"train": {"device": "tpu"}}, "'train.device' = 'tpu'"),
        ({"train": {"betas": [0.9, 1.0]}}, "'train.betas.1' = 1.0"),
        ({"train": {"grad_clip": float("nan")}}, "'train.grad_clip' = nan"),
    ],
)
def test_a_bad_setting_is_named(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_settings(ProgramSettings, values, source="run.toml")
    assert message in str(caught.value)
    assert "source=run.toml" in str(caught.value)


def test_heads_divide_width() -> None:
    assert ModelSettings(width=48, heads=3).width == 48
