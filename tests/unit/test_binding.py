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
    binding.replace(0, value)
    assert model.turned.tolist() == [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]] and model.turned.stride() == (1, 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parameters_in_channels_last_order_are_laid_out_as_all_others_are(dtype: torch.dtype) -> None:
    plain = nn.Conv2d(3, 4, 2).to(dtype)
    last = nn.Conv2d(3, 4, 2).to(dtype)
    last.load_state_dict(plain.state_dict())
    last = last.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    assert not last.weight.is_contiguous()
    pair = [_bound(model) for model in (plain, last)]
    assert pair[0].layout == pair[1].layout
    assert pair[0].snapshot(0).sha256() == pair[1].snapshot(0).sha256()
    for binding in pair:
        binding.add(0, torch.arange(float(binding.layout.elements)))
    assert torch.equal(plain.weight, last.weight) and not last.weight.is_contiguous()
    assert pair[0].snapshot(0).sha256() == pair[1].snapshot(0).sha256()


def test_a_parameter_with_new_storage_is_followed_and_one_of_another_shape_or_type_is_refused() -> None:
    model = nn.Linear(2, 1, bias=False)
    binding = _bound(model)
    model.weight = nn.Parameter(torch.tensor([[5.0, 6.0]]))
    assert binding.snapshot(0).params.tolist() == [5.0, 6.0]
    for strange in (torch.zeros(2, 1), torch.zeros(1, 2, dtype=torch.bfloat16)):
        model.weight = nn.Parameter(strange)
        with pytest.raises(LayoutError, match="name=weight"):
            binding.snapshot(0)
    del model.weight
    with pytest.raises(LayoutError, match="name=weight now=None"):
        binding.add(0, torch.zeros(2))


def test_a_parameter_frozen_later_stands_still_and_follows_the_run() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    binding = _bound(model)
    before = binding.snapshot(0)
    model[0].requires_grad_(False)
    assert binding.snapshot(0).sha256() == before.sha256()
    binding.add(0, torch.ones(12))
    assert torch.equal(binding.snapshot(0).params, before.params + 1.0)
    assert not model[0].weight.requires_grad


@pytest.mark.parametrize("frozen", [True, False])
def test_training_what_the_run_holds_frozen_is_an_error_and_not_lost_work(frozen: bool) -> None:
    model = nn.Sequential(nn.Linear(2, 2).requires_grad_(False), nn.Linear(2, 2))
    binding = _bound(model)
    model[0].requires_grad_(True)
    with pytest.raises(LayoutError, match=r"name=0\.weight.*freeze it again"):
        binding.snapshot(0, frozen=frozen)
    model[0].requires_grad_(False)
    assert binding.snapshot(0, frozen=frozen).frozen.numel() == (6 if frozen else 0)


# memory that goes round


def test_a_snapshot_is_its_takers_alone_until_it_is_given_back() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    binding = _bound(model, 2)
    held = [binding.snapshot(fragment) for fragment in (0, 1, 0)]
    kept = [value.clone() for value in held]
    binding.add(0, torch.ones(binding.layout.fragments[0].elements))
    binding.recycle(binding.snapshot(0))
    binding.snapshot(1)  # into the memory that was given back
    assert all(value.sha256() == copy.sha256() for value, copy in zip(held, kept, strict=True))


def test_memory_is_used_again_by_a_fragment_of_any_size_and_only_two_buffers_are_kept() -> None:
    binding = _bound(nn.ParameterList([torch.ones(5), torch.ones(3)]), 2)
    sizes = [fragment.elements for fragment in binding.layout.fragments]
    first = binding.snapshot(0)
    place = first.params.data_ptr()
    binding.recycle(first)
    second = binding.snapshot(1)
    assert second.params.data_ptr() == place and [first.params.numel(), second.params.numel()] == sizes
    many = [second, *(binding.snapshot(0) for _ in range(4))]
    for value in many:
        binding.recycle(value)
    assert len(binding._host._free) == 2
    foreign = torch.zeros(sizes[0] + 100)
    binding._host.give(foreign[: sizes[0]])  # not ours
    assert all(binding.snapshot(0).params.data_ptr() != foreign.data_ptr() for _ in range(3))


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


def test_each_fragment_touches_only_its_own_tensors() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3), nn.Linear(3, 2))
    binding = _bound(model, 3)
    for fragment in range(3):
        before = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
        binding.add(fragment, torch.ones(binding.layout.fragments[fragment].elements))
        own = {entry.name for entry in binding.layout.of(fragment)}
        changed = {name for name, tensor in model.named_parameters() if not torch.equal(tensor, before[name])}
        assert changed == own
