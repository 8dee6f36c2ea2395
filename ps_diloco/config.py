"""Settings of a run: what ``ps-diloco init`` reads from TOML and what ``config/<n>.json`` holds (format §5.3).

Every field has a default, an unknown field is refused with the nearest known name, and a bad value is an error that names field, value and rule::

    settings = parse_settings(RunSettings, {"outer": {"lr": 0.7}}, source="run.toml")
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from ps_diloco.errors import ConfigError
from ps_diloco.ids import check_unit_name

PositiveInt = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]


class Settings(BaseModel):
    """Base of all settings: frozen, strict, nothing unknown."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)


class OuterSettings(Settings):
    """The outer optimizer: SGD with Nesterov momentum (format §6.3)."""

    lr: float = Field(default=0.7, gt=0, le=10, description="outer learning rate, eta")
    momentum: float = Field(default=0.5, ge=0, lt=1, description="outer momentum, mu")


class MergeSettings(Settings):
    """How contributions of one fragment become one pseudo-gradient (format §6.2), and how long to wait for them."""

    rule: Literal["mean"] = "mean"
    weight_cap: float = Field(default=4.0, ge=1, description="weights are cut at this multiple of the fragment's recent median")
    staleness_power: float = Field(default=0.5, ge=0, le=10, description="factor (1 + lag) ** -power; lag in rounds beyond the first")
    quorum: PositiveInt = Field(default=1, description="units needed before a step")
    quorum_s_max: Seconds = Field(default=60.0, description="longest wait for the quorum")
    grace_s_max: Seconds = Field(default=0.0, description="wait for more units once the window could close")
    merge_at_least: float = Field(default=0.5, ge=0, le=1, description="mass of a round needed before a step")
    merge_wait_s_max: Seconds = Field(default=10.0, description="longest wait for that mass")
    round_window: PositiveInt = Field(default=16, description="outer steps after which a silent unit leaves the round")
    round_tokens: PositiveInt | None = Field(default=None, description="fixed tokens of a round; default: learned from the units")


class PushSettings(Settings):
    """How units encode pseudo-gradients."""

    codec: Literal["none", "bf16", "int8", "int4"] = "int4"
    error_feedback_decay: float = Field(default=1.0, ge=0, le=1, description="beta; 0 switches error feedback off")


class PullSettings(Settings):
    """How the aggregator publishes outer updates (format §4, §6.3)."""

    codec: Literal["none", "bf16", "int8", "int4"] = "int8"
    anchor_every: PositiveInt = Field(default=20, le=1000, description="outer steps of a fragment between two anchors")
    state_every: PositiveInt = Field(default=10, le=1000, description="outer steps of a fragment between two saves of its outer state")


class UnitSettings(Settings):
    """What all units of a run share."""

    sync_every: PositiveInt = Field(default=30, description="H: inner steps between two cuts of one fragment")
    join_warmup_steps: Annotated[int, Field(ge=0)] | None = Field(
        default=None, description="learning-rate ramp of a unit without inner state; default H"
    )
    state_every_cuts: Annotated[int, Field(ge=0)] = Field(default=10, description="cuts between two saves of a unit's own state; 0 never")


class RegionSettings(Settings):
    """A region: a root prefix near some units. ``url`` None means the run's own root."""

    name: str = "home"
    url: str | None = None
    status: Literal["active", "retired"] = "active"

    @field_validator("name")
    @classmethod
    def _named(cls, name: str) -> str:
        return check_unit_name(name, what="region")


class RunSettings(Settings):
    """What can be changed while a run is alive, by a new config number."""

    outer: OuterSettings = OuterSettings()
    merge: MergeSettings = MergeSettings()
    push: PushSettings = PushSettings()
    pull: PullSettings = PullSettings()
    unit: UnitSettings = UnitSettings()
    target_tokens: PositiveInt | None = Field(default=None, description="the run ends when this many tokens are merged")
    regions: tuple[RegionSettings, ...] = (RegionSettings(),)

    @model_validator(mode="after")
    def _check(self) -> RunSettings:
        names = [region.name for region in self.regions]
        if len(set(names)) != len(names) or not names:
            raise ValueError("regions need distinct names, at least one")
        return self


class CreateSettings(Settings):
    """What is fixed when a run is created (``run.json``, format §5.1)."""

    name: str = Field(default="run", max_length=200)
    seed: int = Field(default=0, ge=0, lt=2**63)
    num_fragments: int = Field(default=1, ge=1, le=64, description="P: fragments that are exchanged separately")
    staleness_limit: int = Field(default=64, ge=1, le=1_000_000, description="outer steps after which a contribution is refused")


S = TypeVar("S", bound=BaseModel)


def parse_settings(model: type[S], values: Mapping[str, Any], *, source: str) -> S:
    """Validate ``values``; raise :class:`ConfigError` naming each wrong field, its value, the rule, and the nearest known name."""
    try:
        return model.model_validate(_tuples(values))
    except ValidationError as error:
        raise ConfigError(_explain(model, error), source=source, remedy="correct the setting and run the command again") from None


def read_toml(path: Path) -> dict[str, Any]:
    """Parse a TOML file; raise :class:`ConfigError` with path and position."""
    try:
        with path.open("rb") as file:
            return tomllib.load(file)
    except FileNotFoundError:
        raise ConfigError("no such configuration file", path=path) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
        raise ConfigError("cannot read the configuration file", path=path, cause=error) from None


def set_dotted(values: dict[str, Any], assignment: str) -> None:
    """Apply ``outer.lr=0.5`` to ``values``; the right side is a TOML value, or else text."""
    name, equals, text = assignment.partition("=")
    parts = name.strip().split(".")
    if not equals or not all(parts):
        raise ConfigError("an assignment has the form section.name=value", got=repr(assignment))
    try:
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        parsed = {}
    value = parsed["value"] if len(parsed) == 1 else text  # more than one: the text went on after a line break
    node = values
    for part in parts[:-1]:
        child = node.setdefault(part, {})
        if not isinstance(child, dict):
            raise ConfigError("not a section", name=part, got=repr(assignment))
        node = child
    node[parts[-1]] = value


def _tuples(value: Any) -> Any:
    """TOML arrays are lists; frozen settings hold tuples."""
    if isinstance(value, Mapping):
        return {key: _tuples(item) for key, item in value.items()}
    if isinstance(value, list):
        return tuple(_tuples(item) for item in value)
    return value


def _explain(model: type[BaseModel], error: ValidationError) -> str:
    parts = []
    for item in error.errors(include_url=False):
        where = ".".join(str(step) for step in item["loc"])
        if item["type"] == "extra_forbidden":
            known = _fields_at(model, item["loc"][:-1])
            nearest = difflib.get_close_matches(str(item["loc"][-1]), known, n=1, cutoff=0.5)
            hint = f"did you mean {nearest[0]!r}?" if nearest else "known are " + ", ".join(sorted(known))
            parts.append(f"unknown setting {where!r}, {hint}")
        elif not where:
            parts.append(item["msg"].lower())
        else:
            parts.append(f"setting {where!r} = {item['input']!r}: {item['msg'].lower()}")
    return "; ".join(parts)


def _fields_at(model: type[BaseModel], path: tuple[int | str, ...]) -> list[str]:
    """Names of the fields of the (nested) settings model at ``path``."""
    for step in path:
        if isinstance(step, int):
            continue
        field = model.model_fields.get(step)
        candidates = [field.annotation, *getattr(field.annotation, "__args__", ())] if field is not None else []
        nested = [kind for kind in candidates if isinstance(kind, type) and issubclass(kind, BaseModel)]
        if not nested:
            return []
        model = nested[0]
    return list(model.model_fields)
