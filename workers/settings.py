"""Settings of the training program: the ``program`` object of ``run.json`` (format §5.1).

A run carries them, so that a unit needs nothing but the run's URL::

    program = ProgramSettings()
    run_json_program = program.model_dump(mode="json")
    same = parse_settings(ProgramSettings, run_json_program, source="run.json")

The defaults are sized for a demonstration on one CPU thread: 0.8 million parameters, about 80 ms an inner step.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from ps_diloco.config import PositiveInt, Settings

Fraction = Annotated[float, Field(ge=0, le=1)]


class ModelSettings(Settings):
    """A decoder-only transformer over bytes."""

    kind: Literal["gpt"] = "gpt"
    vocab: int = Field(default=256, ge=256, le=65_536, description="V: tokens are bytes, so at least 256")
    context: int = Field(default=128, ge=2, le=65_536, description="T: longest sequence, in tokens")
    layers: int = Field(default=4, ge=1, le=256)
    heads: int = Field(default=4, ge=1, le=256)
    width: int = Field(default=128, ge=4, le=65_536, description="D: a multiple of twice the heads")
    tied_embedding: bool = Field(default=True, description="the output layer shares the embedding's weights")

    @model_validator(mode="after")
    def _check(self) -> ModelSettings:
        if self.width % (2 * self.heads):
            raise ValueError(f"width is a multiple of twice the heads: width={self.width} heads={self.heads}")
        return self


class DataSettings(Settings):
    """The text to train on, as every unit reads it."""

    source: str = Field(default="stdlib", min_length=1, description="'stdlib', a file, a directory, a glob, or an fsspec URL")
    suffixes: tuple[str, ...] = Field(default=(".txt", ".md", ".rst", ".py"), min_length=1, description="files taken from a directory")
    held_out: float = Field(default=0.05, gt=0, le=0.5, description="share of the text that nobody trains on")
    bytes_max: PositiveInt = Field(default=1 << 30, description="a larger source is refused, since it is held in memory")


class TrainSettings(Settings):
    """The inner optimizer (AdamW), its schedule, and the evaluation."""

    batch_size: PositiveInt = Field(default=8, le=65_536, description="B: sequences in one inner step")
    lr: float = Field(default=2e-3, gt=0, le=10, description="highest inner learning rate")
    min_lr_fraction: float = Field(default=0.1, gt=0, le=1, description="share of lr that is left at the end")
    warmup_fraction: float = Field(
        default=0.1, ge=0, lt=1, description="share of the run in which lr rises; besides the ramp of each unit that starts cold"
    )
    weight_decay: float = Field(default=0.1, ge=0, le=10, description="of matrices; vectors are not decayed")
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.95)
    grad_clip: float = Field(default=1.0, gt=0, description="highest gradient norm")
    device: str = Field(default="auto", pattern=r"^(auto|cpu|mps|cuda(:\d+)?)$", description="auto: CUDA where there is one, else the CPU")
    threads: PositiveInt | None = Field(default=None, le=1024, description="CPU threads of one unit; default: as PyTorch finds")
    eval_batches: PositiveInt = Field(default=16, description="held-out batches of one evaluation")


class ProgramSettings(Settings):
    """Everything the training program needs besides the run's own settings."""

    model: ModelSettings = ModelSettings()
    data: DataSettings = DataSettings()
    train: TrainSettings = TrainSettings()
