"""A unit's own state (format §5.11): round trip, what is refused, and which saved state a restart takes."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

from ps_diloco import keys
from ps_diloco.binding import ModelBinding
from ps_diloco.records import Covers, Ref, UnitState, decode, encode
from ps_diloco.unit.outbox import Identity
from ps_diloco.unit.saved import META, InnerState, capture_optimizer, find_unit_state, restore_optimizer, write_unit_state
from tests.stores import FaultyStore
from tests.unit.scene import Scene


def _who(incarnation: int = 0) -> Identity:
    return Identity(timeline=0, unit="a", incarnation=incarnation)


def _write(scene: Scene, *, incarnation: int = 0, n: int = 0, seq: int = 4, steps: int = 7, extra: Any = None, **more: Any) -> None:
    residuals = more.pop("residuals", {0: torch.full((13,), float(steps))})
    inner = InnerState(optimizer="", tensors=more.pop("tensors", {}), scalars={}, extra=extra, inner_steps=steps, tokens=10 * steps)
    write_unit_state(scene.run, _who(incarnation), n, Covers(timeline=more.pop("timeline", 0), seq=seq), residuals, inner)


def _record_key(incarnation: int = 0, n: int = 0) -> str:
    return keys.unit_state_record("a", incarnation, n)


def _replace_data(scene: Scene, data: bytes, incarnation: int = 0, n: int = 0) -> None:
    """Put other data under a saved state, honestly named by its record."""
    key = _record_key(incarnation, n)
    record = decode(UnitState, scene.store.get(key), key=key)
    scene.store.put(record.data.key, data, overwrite=True)
    ref = Ref(key=record.data.key, size=len(data), sha256=hashlib.sha256(data).hexdigest())
    scene.store.put(key, encode(record.model_copy(update={"data": ref})), overwrite=True)


def _data(meta: dict[str, Any] | str, residual: torch.Tensor) -> bytes:
    text = meta if isinstance(meta, str) else json.dumps(meta)
    return safetensors.torch.save({"residual/0": residual}, metadata={META: text})


GOOD_META = {"optimizer": "", "inner_steps": 1, "tokens": 1, "extra": None, "scalars": {}}


def _trained(optimizer_of: Any, steps: int = 3) -> tuple[nn.Module, torch.optim.Optimizer, ModelBinding, Scene]:
    torch.manual_seed(0)
    scene = Scene(model=lambda: nn.Linear(3, 2))
    model = nn.Linear(3, 2)
    optimizer = optimizer_of(model.parameters())
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(4, 3)).square().sum().backward()
        optimizer.step()
    return model, optimizer, ModelBinding(model, scene.run.layout), scene


OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "plain sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.1),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.1),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_goes_on_from_its_saved_state_as_if_nothing_had_happened(name: str) -> None:
    model, optimizer, binding, scene = _trained(OPTIMIZERS[name])
    tensors, scalars = capture_optimizer(optimizer, binding.names)
    inner = InnerState(
        optimizer=type(optimizer).__name__, tensors=tensors, scalars=scalars, extra={"cursor": [1, "x"]}, inner_steps=3, tokens=30
    )
    residual = torch.randn(8)
    write_unit_state(scene.run, _who(), 0, Covers(timeline=0, seq=4), {0: residual}, inner)

    restored = find_unit_state(scene.run, "a", 0)
    assert restored is not None
    assert (restored.incarnation, restored.covers) == (0, Covers(timeline=0, seq=4))
    assert (restored.inner.inner_steps, restored.inner.tokens, restored.inner.extra) == (3, 30, {"cursor": [1, "x"]})
    assert torch.equal(restored.residuals[0], residual)

    twin = nn.Linear(3, 2)
    twin.load_state_dict(model.state_dict())
    other = OPTIMIZERS[name](twin.parameters())
    assert restore_optimizer(other, ModelBinding(twin, scene.run.layout).names, restored.inner)
    for net, opt in ((model, optimizer), (twin, other)):
        for _ in range(2):
            opt.zero_grad()
            net(torch.ones(4, 3)).square().sum().backward()
            opt.step()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))


def test_captured_tensors_do_not_change_when_training_goes_on() -> None:
    model, optimizer, binding, _ = _trained(OPTIMIZERS["adamw"])
    tensors, _ = capture_optimizer(optimizer, binding.names)
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    optimizer.zero_grad()
    model(torch.ones(4, 3)).sum().backward()
    optimizer.step()
    assert sorted(tensors) == sorted(f"state/{p}/{k}" for p in ("weight", "bias") for k in ("step", "exp_avg", "exp_avg_sq"))
    assert all(torch.equal(tensors[name], before[name]) for name in tensors)


@pytest.mark.parametrize(("kind", "place"), [("SGD", "state/weight/exp_avg"), ("AdamW", "state/nothing/exp_avg")])
def test_the_state_of_another_optimizer_or_parameter_is_left_alone(kind: str, place: str) -> None:
    _, optimizer, binding, _ = _trained(OPTIMIZERS["adamw"])
    before, _ = capture_optimizer(optimizer, binding.names)
    inner = InnerState(optimizer=kind, tensors={place: torch.zeros(6)}, scalars={}, extra=None, inner_steps=0, tokens=0)
    assert not restore_optimizer(optimizer, binding.names, inner)
    after, _ = capture_optimizer(optimizer, binding.names)
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_an_optimizer_whose_state_has_shapes_of_its_own_goes_on_too() -> None:
    _, optimizer, binding, _ = _trained(OPTIMIZERS["adafactor"])
    tensors, scalars = capture_optimizer(optimizer, binding.names)
    inner = InnerState(optimizer="Adafactor", tensors=tensors, scalars=scalars, extra=None, inner_steps=0, tokens=0)
    assert restore_optimizer(optimizer, binding.names, inner)


def test_the_newest_saved_state_is_taken() -> None:
    scene = Scene()
    for incarnation, n in ((0, 0), (0, 9), (0, 10), (1, 0), (1, 1)):
        _write(scene, incarnation=incarnation, n=n, steps=100 * incarnation + n + 1)
    restored = find_unit_state(scene.run, "a", 0)
    assert restored is not None and restored.incarnation == 1 and restored.inner.inner_steps == 102


def test_no_saved_state_is_none() -> None:
    scene = Scene()
    assert find_unit_state(scene.run, "a", 0) is None
    _write(scene, timeline=1)
    assert find_unit_state(scene.run, "a", 0) is None  # of another timeline
    assert find_unit_state(scene.run, "b", 1) is None  # of another unit


RESIDUAL = torch.ones(13)
DAMAGE: dict[str, bytes] = {
    "nothing": b"",
    "rubbish": b"rubbish, and long enough to hold a header length",
    "a pickle": b"\x80\x04\x95\x10\0\0\0\0\0\0\0}\x94.",
    "a huge header length": (2**62).to_bytes(8, "little") + bytes(20),
    "no metadata": safetensors.torch.save({"residual/0": RESIDUAL}),
    "metadata of others": safetensors.torch.save({"residual/0": RESIDUAL}, metadata={"pt": "1"}),
    "metadata that is no JSON": _data("{", RESIDUAL),
    "metadata that is a list": _data("[]", RESIDUAL),
    "metadata of great depth": _data("[" * 100_000, RESIDUAL),
    "metadata without scalars": _data({"inner_steps": 1, "tokens": 1, "extra": None}, RESIDUAL),
    "endless steps": _data('{"inner_steps": Infinity, "tokens": 1, "extra": null, "scalars": {}}', RESIDUAL),
    "no steps": _data(GOOD_META | {"inner_steps": None}, RESIDUAL),
    "a residual of another shape": _data(GOOD_META, torch.ones(12)),
    "a residual of two dimensions": _data(GOOD_META, torch.ones(13, 1)),
    "a residual of another type": _data(GOOD_META, torch.ones(13, dtype=torch.float64)),
    "a residual that is not finite": _data(GOOD_META, torch.full((13,), torch.nan)),
    "no residual": safetensors.torch.save({"other": RESIDUAL}, metadata={META: json.dumps(GOOD_META)}),
}


def test_the_forged_data_would_be_read_if_it_were_good() -> None:
    scene = Scene()
    _write(scene)
    _replace_data(scene, _data(GOOD_META, RESIDUAL))
    restored = find_unit_state(scene.run, "a", 0)
    assert restored is not None and restored.inner.inner_steps == 1


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_saved_state_is_passed_over_for_an_older_one(name: str, caplog: pytest.LogCaptureFixture) -> None:
    scene = Scene()
    _write(scene, n=0, steps=5)
    _write(scene, n=1, steps=6)
    _replace_data(scene, DAMAGE[name], n=1)
    restored = find_unit_state(scene.run, "a", 0)
    assert restored is not None and restored.inner.inner_steps == 5
    assert "cannot be used, trying an older one" in caplog.text


def test_a_bad_record_or_a_missing_or_flipped_file_is_passed_over() -> None:
    scene = Scene()
    for n in range(6):
        _write(scene, n=n, steps=n)
    files = {n: decode(UnitState, scene.store.get(_record_key(0, n)), key="").data.key for n in range(6)}
    scene.store.put(_record_key(0, 5), b"{", overwrite=True)
    scene.store.put(_record_key(0, 4), b"x" * (2 << 20), overwrite=True)
    scene.store.delete(files[3])
    data = scene.store.get(files[2])
    scene.store.put(files[2], data[:-1] + bytes([data[-1] ^ 1]), overwrite=True)
    record = decode(UnitState, scene.store.get(_record_key(0, 1)), key="")
    scene.store.put(_record_key(0, 1), encode(record.model_copy(update={"layout_hash": "0" * 64})), overwrite=True)
    restored = find_unit_state(scene.run, "a", 0)
    assert restored is not None and restored.inner.inner_steps == 0


def test_a_state_larger_than_the_model_can_need_is_not_fetched() -> None:
    scene = Scene()
    _write(scene)
    key = _record_key()
    record = decode(UnitState, scene.store.get(key), key=key)
    huge = record.data.model_copy(update={"size": 1 << 50})
    scene.store.put(key, encode(record.model_copy(update={"data": huge})), overwrite=True)
    store = FaultyStore(scene.store)
    assert find_unit_state(type(scene.run)(store=store, env=scene.run.env, record=scene.run.record), "a", 0) is None
    assert not any(call.key.endswith(".safetensors") for call in store.calls)


def test_the_record_is_written_last() -> None:
    scene = Scene()
    store = FaultyStore(scene.store)
    run = type(scene.run)(store=store, env=scene.run.env, record=scene.run.record)
    inner = InnerState(optimizer="", tensors={}, scalars={}, extra=None, inner_steps=1, tokens=1)
    write_unit_state(run, _who(), 0, Covers(timeline=0, seq=-1), {0: RESIDUAL}, inner)
    assert [call.key.rsplit(".", 1)[1] for call in store.calls if call.verb == "put"] == ["safetensors", "json"]
