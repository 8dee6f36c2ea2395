"""Parameters of a short type (format §6.1): a float32 shadow carries what the type cannot, whoever moves the parameter, and however it ends."""

from __future__ import annotations

from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import nn

from ps_diloco.binding import ModelBinding
from ps_diloco.cli.main import app
from ps_diloco.errors import NonFinite
from ps_diloco.layout import build_layout
from ps_diloco.run import OpenRun
from ps_diloco.store import LocalStore
from ps_diloco.weights import read_weights
from tests.unit.scene import Scene, wait_until

SHORT = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)


class Ones(nn.Module):
    """Two parameters that are 1 everywhere, or as told."""

    def __init__(self, dtype: torch.dtype, start: float = 1.0) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.full((4,), start, dtype=dtype))
        self.b = nn.Parameter(torch.full((2, 2), start, dtype=dtype))


def _bound(model: nn.Module) -> ModelBinding:
    return ModelBinding(model, build_layout(model))


def _rounded(model: nn.Module, value: torch.Tensor) -> bool:
    """Whether the model's parameters are ``value`` in their own type."""
    flat = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    return torch.equal(flat, value.to(flat.dtype))


# the shadow itself


@SHORT
def test_a_thousand_small_corrections_arrive_that_the_naive_way_loses(dtype: torch.dtype) -> None:
    model, naive = Ones(dtype), Ones(dtype)
    binding = _bound(model)
    step = torch.full((8,), 1e-3)
    for _ in range(1000):
        binding.add(0, step)
        with torch.no_grad():
            naive.a.add_(step[:4])
    assert binding.snapshot(0).params.tolist() == pytest.approx([2.0] * 8, abs=1e-4)
    assert model.a.tolist() == [2.0] * 4 and model.a.dtype == dtype
    assert not torch.allclose(naive.a.float(), torch.tensor(2.0), atol=0.02)  # the control: bfloat16 stays at 1, float16 ends at 1.977


def test_without_a_shadow_a_bfloat16_parameter_does_not_move_at_all() -> None:
    naive = torch.ones(1, dtype=torch.bfloat16)
    for _ in range(1000):
        naive.add_(1e-3)
    assert naive.item() == 1.0


@SHORT
def test_what_the_program_does_to_a_parameter_is_taken_in_and_small_remainders_stay(dtype: torch.dtype) -> None:
    model = Ones(dtype)
    binding = _bound(model)
    binding.add(0, torch.full((8,), 2.0**-12))  # below what either type holds beside 1
    assert model.a.tolist() == [1.0] * 4
    with torch.no_grad():
        model.a.add_(1.0)
    assert binding.snapshot(0).params.tolist() == [2.0 + 2.0**-12] * 4 + [1.0 + 2.0**-12] * 4
    assert binding.snapshot(0).params.tolist() == [2.0 + 2.0**-12] * 4 + [1.0 + 2.0**-12] * 4  # looking changes nothing
    model.load_state_dict(Ones(dtype, start=0.5).state_dict())
    assert binding.snapshot(0).params.tolist() == [0.5 + 2.0**-12] * 8
    model.a = nn.Parameter(torch.full((4,), -1.0, dtype=dtype))  # new storage
    assert binding.snapshot(0).params.tolist() == [-1.0 + 2.0**-12] * 4 + [0.5 + 2.0**-12] * 4
    assert model.a.tolist() == [-1.0] * 4


def test_the_parameter_is_the_shadow_rounded_after_every_call() -> None:
    """Also after a snapshot: a shadow of 0.99915 rounds to 1, and not to the 0.99609 that the optimizer left."""
    model = Ones(torch.bfloat16)
    binding = _bound(model)
    binding.add(0, torch.full((8,), 0.003))
    with torch.no_grad():
        model.a.fill_(0.99609375)
    value = binding.snapshot(0)
    assert value.params[0].item() == pytest.approx(0.99909, abs=1e-5)
    assert model.a.tolist() == [1.0] * 4 and _rounded(model, value.params)
    assert torch.equal(binding.snapshot(0).params, value.params)


@SHORT
def test_a_replacement_forgets_what_was_before(dtype: torch.dtype) -> None:
    model = Ones(dtype)
    binding = _bound(model)
    binding.add(0, torch.full((8,), 0.3))
    with torch.no_grad():
        model.b.fill_(float("nan"))
    value = binding.snapshot(0)
    value.params.copy_(torch.linspace(-1.0, 1.0, 8))
    binding.replace(0, value)
    assert torch.equal(binding.snapshot(0).params, torch.linspace(-1.0, 1.0, 8)) and _rounded(model, value.params)


@SHORT
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_value_that_is_not_finite_shows_in_the_snapshot_and_leaves_no_trace_once_mended(dtype: torch.dtype, bad: float) -> None:
    model = Ones(dtype)
    binding = _bound(model)
    with torch.no_grad():
        model.a[1] = bad
    binding.add(0, torch.full((8,), 2.0**-14))
    assert torch.isfinite(binding.snapshot(0).params).tolist() == [True, False] + [True] * 6
    with torch.no_grad():
        model.a[1] = 3.0
    assert binding.snapshot(0).params.tolist() == [1.0 + 2.0**-14, 3.0] + [1.0 + 2.0**-14] * 6


def test_a_value_beyond_the_short_type_shows_as_infinite_and_not_as_a_number() -> None:
    model = Ones(torch.float16)
    binding = _bound(model)
    binding.add(0, torch.full((8,), 70_000.0))
    assert model.a.isinf().all() and not torch.isfinite(binding.snapshot(0).params).any()


@SHORT
def test_frozen_parameters_and_buffers_of_a_short_type_come_back_bit_for_bit(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(9, 9).to(dtype).requires_grad_(False), nn.BatchNorm1d(9).to(dtype))
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)  # all bit patterns of 16 bits
    every = every[every.isfinite()]
    model.register_buffer("every", every.clone())
    binding = _bound(model)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    value = binding.snapshot(0)
    with torch.no_grad():
        for tensor in (*model[1].parameters(), *model.buffers()):
            tensor.zero_()
    binding.replace(0, value)
    for name, tensor in model.state_dict().items():
        assert tensor.dtype == before[name].dtype
        assert tensor.view(torch.int16 if tensor.itemsize == 2 else tensor.dtype).equal(
            before[name].view(torch.int16 if tensor.itemsize == 2 else tensor.dtype)
        ), name
    model.every.zero_()
    binding.adopt_buffers(0, value.floats, value.ints)
    assert torch.equal(model.every.view(torch.int16), every.view(torch.int16))


# a whole run


def _weights(scene: Scene, **options: bool) -> dict[str, torch.Tensor]:
    run: OpenRun = scene.run
    return read_weights(run, scene.head, **options)


@SHORT
def test_units_of_a_short_type_hold_global_plus_own_work_below_its_resolution(dtype: torch.dtype) -> None:
    """One unit moves by 2^-7, the other not at all: the mean moves by 2^-8 a round, half of what bfloat16 can tell from 1."""
    scene = Scene(model=lambda: Ones(dtype), sync_every=1)
    with scene.join("a") as a, scene.join("b") as b:
        scene.aggregate(until=lambda: len(scene.head.units) == 2)
        start = scene.value().params.clone()
        for _ in range(9):
            a.train(1, by=-(2.0**-7))
            b.train(1, by=0.0)
            scene.sync(a, b)
        world = scene.value().params
        assert torch.equal(world, start - 9 * 2.0**-8)
        for trainer in (a, b):
            assert torch.equal(trainer.unit._binding.snapshot(0).params, world) and _rounded(trainer.model, world)  # I11, bit for bit
            assert all(abs(balance) < 1e-6 for _, balance in trainer.parts.engine.accounts)
        a.abandon()
        b.abandon()
    assert {str(tensor.dtype) for tensor in _weights(scene).values()} == {str(dtype)}
    master = torch.cat([tensor.flatten() for tensor in _weights(scene, float32=True).values()])
    assert torch.equal(master, world)


def test_an_export_has_the_models_dtype_or_all_that_the_run_keeps(tmp_path: Path) -> None:
    scene = Scene(model=lambda: Ones(torch.bfloat16), store=LocalStore(tmp_path / "run"))
    with scene.join("a") as trainer:
        trainer.unit._binding.add(0, torch.full((8,), 2.0**-12))  # as work of the unit
        trainer.train(2, by=0.0)
        scene.sync(trainer)
        trainer.abandon()
    for options, dtype, value in (([], torch.bfloat16, 1.0), (["--float32"], torch.float32, 1.0 + 2.0**-12)):
        file = tmp_path / f"{dtype}.safetensors"
        with pytest.raises(SystemExit) as ended:
            app(["export", str(tmp_path / "run"), str(file), *options])
        weights = safetensors.torch.load_file(file)
        assert ended.value.code == 0 and {str(tensor.dtype) for tensor in weights.values()} == {str(dtype)}
        assert all(tensor.unique().tolist() == [value] for tensor in weights.values())
        Ones(torch.bfloat16).load_state_dict(weights)


@SHORT
def test_what_is_published_is_exact_in_a_short_type(dtype: torch.dtype) -> None:
    def build() -> nn.Module:
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 2).requires_grad_(False)).to(dtype)

    scene = Scene(model=build, sync_every=1)
    model = build()
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.zero_()  # a unit loads what the run holds
    with scene.join("a", model=model) as trainer:
        for name, tensor in build().state_dict().items():
            assert torch.equal(tensor, model.state_dict()[name]) and torch.equal(tensor, _weights(scene)[name])
        with torch.no_grad():
            torch.manual_seed(4)
            for tensor in (*model[0].parameters(), model[1].running_mean):
                tensor.copy_(torch.randn(tensor.shape).to(dtype))
        kept = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        trainer.unit.step(tokens=10)
        scene.sync(trainer)
        trainer.abandon()
    weights = _weights(scene)
    assert all(torch.equal(tensor, weights[name]) and torch.equal(tensor, model.state_dict()[name]) for name, tensor in kept.items())


def test_a_restarted_unit_has_the_global_float32_values_and_its_unsent_work() -> None:
    scene = Scene(model=lambda: Ones(torch.bfloat16), sync_every=2)
    with scene.join("a") as first:
        for _ in range(3):
            first.train(2, by=2.0**-8)
            scene.sync(first)
        first.train(1, by=-1.0)
        first.parts.outbox.listed.clear()  # the last span reaches nobody: it goes into the saved state
    world = scene.value().params.clone()
    with scene.join("a") as second:
        binding = second.unit._binding
        assert torch.equal(binding.snapshot(0).params, world) and _rounded(second.model, world)
        scene.aggregate(until=lambda: scene.head.units["a"].incarnation == 1)
        wait_until(second.parts.outbox.listed.is_set)
        second.train(2, by=0.0)
        scene.sync(second)
        assert torch.equal(scene.value().params, world - 1.0)
        assert torch.equal(binding.snapshot(0).params, world - 1.0)
        second.abandon()


def test_a_model_of_a_short_type_that_is_not_finite_is_reported_at_the_cut() -> None:
    scene = Scene(model=lambda: Ones(torch.bfloat16))
    trainer = scene.open("a")
    with torch.no_grad():
        trainer.model.b.fill_(float("nan"))  # type: ignore[union-attr, operator]
    with pytest.raises(NonFinite, match=r"tensor=b .*start the unit again"):
        trainer.train(2)
        trainer.unit.close(drain_s=5.0)
    assert scene.records("a") == []
