"""A unit's own resumable state: residuals, inner optimizer, data cursor (format §5.11). Safetensors, never pickle."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import safetensors
import safetensors.torch
import torch

from ps_diloco import keys
from ps_diloco.errors import FormatError, IntegrityError, LimitExceeded, NotFound
from ps_diloco.records import RECORD_BYTES_MAX, Covers, UnitState, decode, encode
from ps_diloco.run import OpenRun
from ps_diloco.store.claim import claim_object
from ps_diloco.store.refs import fetch, put_data
from ps_diloco.unit.outbox import Identity

log = logging.getLogger("ps_diloco.unit")

META = "ps_diloco"


@dataclass(frozen=True, kw_only=True)
class InnerState:
    """The inner optimizer's state by entry name, and what the program adds (JSON). Tensors are on the host and nobody changes them."""

    optimizer: str
    """Class name; the state of one kind of optimizer is of no use to another."""
    tensors: Mapping[str, torch.Tensor]
    scalars: Mapping[str, float | int]
    extra: Any
    inner_steps: int
    tokens: int


@dataclass(frozen=True, kw_only=True)
class Restored:
    """A saved state that was found: whose it is, what it covers."""

    incarnation: int
    covers: Covers
    residuals: Mapping[int, torch.Tensor]
    inner: InnerState


def capture_optimizer(
    optimizer: torch.optim.Optimizer, names: Mapping[torch.Tensor, str]
) -> tuple[dict[str, torch.Tensor], dict[str, float | int]]:
    """Copy the optimizer's state to the host: ``state/<entry>/<key>`` -> tensor, and numbers beside. Runs on the training thread."""
    tensors: dict[str, torch.Tensor] = {}
    scalars: dict[str, float | int] = {}
    for parameter, state in optimizer.state.items():
        if parameter not in names:
            continue
        for key, value in state.items():
            place = f"state/{names[parameter]}/{key}"
            if isinstance(value, torch.Tensor):
                tensors[place] = value.detach().to("cpu", copy=True).contiguous()
            elif isinstance(value, int | float) and not isinstance(value, bool):
                scalars[place] = value
            elif value is not None:
                log.warning("the optimizer keeps %s as %s, which cannot be saved; a restart begins it anew", place, type(value).__name__)
    return tensors, scalars


def restore_optimizer(optimizer: torch.optim.Optimizer, names: Mapping[torch.Tensor, str], inner: InnerState) -> bool:
    """Put a saved state into the optimizer. False, and nothing is changed, if it is that of another kind of optimizer or of other parameters."""
    by_name = {name: parameter for parameter, name in names.items()}
    places = [*inner.tensors.items(), *inner.scalars.items()]
    named = [(*place.removeprefix("state/").rpartition("/")[::2], value) for place, value in places]
    if inner.optimizer != type(optimizer).__name__ or any(name not in by_name for name, _, _ in named):
        log.warning(
            "the saved state is of another optimizer (%s); this one begins anew, with a learning-rate ramp", inner.optimizer or "none"
        )
        return False
    on_device = {
        parameter for group in optimizer.param_groups for parameter in group["params"] if group.get("fused") or group.get("capturable")
    }
    for name, key, value in named:
        parameter = by_name[name]
        if isinstance(value, torch.Tensor):
            near = value.numel() > 1 or parameter in on_device
            optimizer.state[parameter][key] = value.to(parameter.device if near else "cpu", copy=True)
        else:
            optimizer.state[parameter][key] = value
    return True


def write_unit_state(
    run: OpenRun, identity: Identity, n: int, covers: Covers, residuals: Mapping[int, torch.Tensor], inner: InnerState
) -> None:
    """Write data, then the record. Does I/O; a crash between leaves an orphan."""
    meta = {
        "unit": identity.unit,
        "incarnation": identity.incarnation,
        "n": n,
        "timeline": covers.timeline,
        "covers": covers.seq,
        "layout_hash": run.record.layout_hash,
        "inner_steps": inner.inner_steps,
        "tokens": inner.tokens,
        "optimizer": inner.optimizer,
        "scalars": dict(inner.scalars),
        "extra": inner.extra,
    }
    tensors = {**inner.tensors, **{f"residual/{fragment}": residual for fragment, residual in residuals.items()}}
    data = safetensors.torch.save(tensors, metadata={META: json.dumps(meta, allow_nan=False)})
    attempt = run.env.entropy.attempt_id()
    ref = put_data(run.store, run.env, keys.unit_state_data(identity.unit, identity.incarnation, n, attempt), data)
    record = UnitState(
        run_id=run.run_id,
        unit=identity.unit,
        incarnation=identity.incarnation,
        n=n,
        attempt=attempt,
        covers=covers,
        layout_hash=run.record.layout_hash,
        data=ref,
        created_at=run.env.clock.wall_text(),
    )
    claim_object(
        run.store, run.env, keys.unit_state_record(identity.unit, identity.incarnation, n), encode(record), max_bytes=RECORD_BYTES_MAX
    )


def find_unit_state(run: OpenRun, unit: str, timeline: int) -> Restored | None:
    """The newest usable saved state of a unit in a timeline, or None. Damaged ones are skipped with a warning. Does I/O (one LIST)."""
    records = [info.key for info in run.store.list(keys.unit_states(unit)) if keys.parse_unit_state(info.key)]
    for key in sorted(records, key=lambda key: keys.parse_unit_state(key) or (0, 0), reverse=True):
        try:
            record = decode(UnitState, run.store.get(key, max_bytes=RECORD_BYTES_MAX), key=key, run_id=run.run_id)
            if record.unit != unit or record.layout_hash != run.record.layout_hash or record.covers.timeline != timeline:
                continue
            return _load(run, record)
        except (FormatError, NotFound) as error:
            log.warning("saved state %s cannot be used, trying an older one: %s", key, error)
    return None


def _load(run: OpenRun, record: UnitState) -> Restored:
    limit = 64 * run.layout.elements + (64 << 20)
    if record.data.size > limit:
        raise LimitExceeded(
            "saved state is larger than a model of this size can need", key=record.data.key, size=record.data.size, limit=limit
        )
    data = fetch(run.store, record.data, max_bytes=limit)
    try:
        tensors = safetensors.torch.load(data)
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        meta = json.loads(header["__metadata__"][META])
        scalars = {str(name): value for name, value in meta["scalars"].items() if isinstance(value, int | float)}
        inner_steps, tokens, extra = int(meta["inner_steps"]), int(meta["tokens"]), meta["extra"]
        optimizer = str(meta["optimizer"])
    except (safetensors.SafetensorError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise FormatError("saved state is not what the format asks for", key=record.data.key, cause=str(error)[:200]) from None
    residuals = {}
    for fragment, size in enumerate(run.layout.fragments):
        residual = tensors.pop(f"residual/{fragment}", None)
        if residual is None or residual.shape != (size.elements,) or residual.dtype != torch.float32 or not torch.isfinite(residual).all():
            raise IntegrityError(
                "residual of a saved state is absent or not finite or has a wrong shape", key=record.data.key, fragment=fragment
            )
        residuals[fragment] = residual
    return Restored(
        incarnation=record.incarnation,
        covers=record.covers,
        residuals=residuals,
        inner=InnerState(optimizer=optimizer, tensors=tensors, scalars=scalars, extra=extra, inner_steps=inner_steps, tokens=tokens),
    )
