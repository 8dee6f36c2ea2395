"""Models as wrappers leave them: the same layout under DDP, torch.compile and activation checkpointing; what is sharded is refused by name."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

from ps_diloco.binding import ModelBinding
from ps_diloco.errors import LayoutError
from ps_diloco.layout import build_layout
from tests.unit.scene import Scene


@pytest.fixture(scope="module", autouse=True)
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))


def _checkpointed(model: nn.Module) -> nn.Module:
    assert isinstance(model, nn.Sequential)
    return nn.Sequential(*(checkpoint_wrapper(part) for part in model))


WRAPPERS = {
    "ddp": DistributedDataParallel,
    "compile": lambda model: torch.compile(model, backend="eager"),
    "checkpoint": _checkpointed,
    "compiled ddp": lambda model: torch.compile(DistributedDataParallel(model), backend="eager"),
    "ddp of compiled": lambda model: DistributedDataParallel(torch.compile(model, backend="eager")),
    "all": lambda model: torch.compile(DistributedDataParallel(_checkpointed(model)), backend="eager"),
}


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS.keys())
def test_a_wrapped_model_has_the_layout_and_the_values_of_the_plain_one(wrap) -> None:  # type: ignore[no-untyped-def]
    plain, inner = _model(), _model()
    wrapped = wrap(inner)
    layout = build_layout(plain)
    assert build_layout(wrapped) == layout
    binding = ModelBinding(wrapped, layout)
    assert binding.snapshot(0).sha256() == ModelBinding(plain, layout).snapshot(0).sha256()
    binding.add(0, torch.ones(layout.elements))
    for name, parameter in inner.named_parameters():
        assert torch.equal(parameter, plain.get_parameter(name.replace("_checkpoint_wrapped_module.", "")) + 1.0)
    assert set(binding.names) == set(wrapped.parameters())  # what the optimizer has


def test_a_model_under_ddp_trains_on_from_a_correction() -> None:
    """The reducer keeps the parameters that it was built with: a correction must be made in place."""
    models = [_model(), DistributedDataParallel(_model())]
    batch = torch.arange(12.0).view(4, 3) / 12
    for model in models:
        binding = ModelBinding(model, build_layout(model))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
            binding.add(0, torch.full((binding.layout.elements,), 0.01))
    values = [ModelBinding(model, build_layout(model)).snapshot(0).params for model in models]
    torch.testing.assert_close(values[0], values[1])


def test_a_replica_among_others_is_told_that_it_alone_is_corrected(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = Scene(model=_model)
    for ranks, said in ((1, ""), (2, "one of 2 replicas")):
        model = DistributedDataParallel(_model())
        monkeypatch.setattr(type(model.process_group), "size", lambda group, ranks=ranks: ranks)
        with scene.join("a", model=model) as trainer:
            trainer.abandon()
        assert said in caplog.text and ("replicas" in caplog.text) == bool(said)


def test_parameters_that_are_sharded_are_refused_with_a_way_out() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    fully_shard(model[1], mesh=init_device_mesh("cpu", (1,)))
    with pytest.raises(LayoutError, match=r"several ranks are not supported yet: name=1\.weight .*on one rank"):
        build_layout(model)


def test_modules_that_the_older_fsdp_shards_are_refused_with_a_way_out() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that one rank has nothing to shard
        model = nn.Sequential(nn.Linear(3, 2), FullyShardedDataParallel(nn.Linear(2, 2), device_id=torch.device("cpu")))
    with pytest.raises(LayoutError, match=r"several ranks are not supported yet: module=1;.*on one rank"):
        build_layout(model)


def test_a_parameter_without_a_shape_is_refused_until_a_batch_gave_it_one() -> None:
    model = nn.Sequential(nn.LazyLinear(3))
    with pytest.raises(LayoutError, match=r"name=0\.weight; run one batch"):
        build_layout(model)
    model(torch.zeros(1, 2))
    assert build_layout(model) == build_layout(nn.Sequential(nn.Linear(2, 3)))
