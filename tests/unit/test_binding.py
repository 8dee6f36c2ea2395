"""The model seen through a layout (format §5.2, §6.1): copies out, corrections in, buffers, ties, frozen and strange tensors."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ps_diloco.binding import ModelBinding
from ps_diloco.errors import LayoutError
from ps_diloco.layout import build_layout


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(4, 3)
        self.head = nn.Linear(3, 4, bias=False)
        self.head.weight = self.embed.weight


def _bound(model: nn.Module, fragments: int = 1) -> ModelBinding:
    return ModelBinding(model, build_layout(model, fragments))


def test_a_snapshot_is_a_copy_and_replace_puts_it_back() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2).requires_grad_(False))
    binding = _bound(model)
    value = binding.snapshot(0)
    kept = value.clone()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.add_(1)
    assert value.sha256() == kept.sha256()
    binding.replace(0, value)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_a_correction_is_added_to_parameters_alone_and_to_tied_ones_once() -> None:
    model = Tied()
    binding = _bound(model)
    before = model.embed.weight.detach().clone()
    correction = torch.arange(12.0)
    binding.add(0, correction)
    assert torch.equal(model.embed.weight.detach(), before + correction.view(4, 3))
    assert model.head.weight is model.embed.weight


def test_frozen_parameters_are_in_a_value_and_in_no_correction() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).requires_grad_(False), nn.Linear(2, 2))
    binding = _bound(model)
    frozen = model[1].weight.detach().clone()
    value = binding.snapshot(0)
    assert value.params.numel() == 12 and value.frozen.numel() == 6
    binding.add(0, torch.ones(12))
    assert torch.equal(model[1].weight.detach(), frozen)
    value.frozen.fill_(9.0)
    binding.replace(0, value)
    assert torch.equal(model[1].weight.detach(), torch.full((2, 2), 9.0))


def test_float_buffers_are_adopted_and_integer_ones_become_the_larger() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    model.register_buffer("flags", torch.tensor([True, False]))
    binding = _bound(model)
    model[1].num_batches_tracked.fill_(7)
    ours = binding.snapshot(0)
    assert ours.ints.tolist() in ([7, 1, 0], [1, 0, 7])
    for count, wanted in ((3, 7), (9, 9)):
        ints = torch.where(ours.ints == 7, torch.tensor(count), torch.tensor(1))
        binding.adopt_buffers(0, torch.tensor([1.0, 2.0, 3.0, 4.0]), ints)
        assert int(model[1].num_batches_tracked) == wanted
    assert model.flags.tolist() == [True, True] and model.flags.dtype == torch.bool
    assert sorted([*model[1].running_mean.tolist(), *model[1].running_var.tolist()]) == [1.0, 2.0, 3.0, 4.0]


@pytest.mark.parametrize("shape", [(), (1,), (3,), (7, 13), (2, 50), (2, 3, 4)])
def test_tensors_of_any_shape_go_through(shape: tuple[int, ...]) -> None:
    model = nn.Module()
    model.register_parameter("p", nn.Parameter(torch.randn(shape)))
    model.register_parameter("q", nn.Parameter(torch.randn(5)))
    binding = _bound(model)
    before = model.p.detach().clone()
    value = binding.snapshot(0)
    binding.add(0, torch.ones_like(value.params))
    assert torch.equal(model.p.detach(), before + 1.0)
    binding.replace(0, value)
    assert torch.equal(model.p.detach(), before)


def test_empty_and_transposed_tensors_go_through() -> None:
    model = nn.Module()
    model.register_parameter("empty", nn.Parameter(torch.empty(0, 3)))
    model.register_parameter("turned", nn.Parameter(torch.arange(6.0).view(2, 3).t()))
    binding = _bound(model)
    value = binding.snapshot(0)
    assert value.params.tolist() == [0.0, 3.0, 1.0, 4.0, 2.0, 5.0]  # row-major order of the parameter
    binding.add(0, torch.arange(6.0))
    assert model.turned.tolist() == [[0.0, 4.0], [3.0, 7.0], [6.0, 10.0]]


def test_autograd_does_not_notice_a_correction() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    binding = _bound(model)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        binding.add(0, torch.ones(3))
    assert model.weight.requires_grad and model.weight.is_leaf and model.weight.grad is not None


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_trainable_parameters_of_another_type_are_refused_with_a_remedy(dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).to(dtype))
    with pytest.raises(LayoutError) as caught:
        _bound(model)
    assert caught.value.facts["name"] == "1.weight" and "autocast" in caught.value.remedy


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_frozen_parameters_of_a_short_type_come_back_exactly(dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).to(dtype).requires_grad_(False))
    binding = _bound(model)
    before = model[1].weight.detach().clone()
    value = binding.snapshot(0)
    with torch.no_grad():
        model[1].weight.zero_()
    binding.replace(0, value)
    assert torch.equal(model[1].weight.detach(), before) and model[1].weight.dtype == dtype


def test_each_fragment_touches_only_its_own_tensors() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3), nn.Linear(3, 2))
    binding = _bound(model, 3)
    for fragment in range(3):
        before = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
        binding.add(fragment, torch.ones(binding.layout.fragments[fragment].elements))
        own = {entry.name for entry in binding.layout.of(fragment)}
        changed = {name for name, tensor in model.named_parameters() if not torch.equal(tensor, before[name])}
        assert changed == own
