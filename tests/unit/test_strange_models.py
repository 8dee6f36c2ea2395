"""Models of every shape and kind through whole merges and adoptions, with the values that they must have afterwards (format §5.2, §6.2)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import nn

from ps_diloco.cli.main import app
from ps_diloco.errors import LayoutError
from ps_diloco.host import HostBuffers
from ps_diloco.store import LocalStore
from ps_diloco.unit.engine import Restart
from ps_diloco.weights import read_weights
from tests.unit.scene import Scene, Trainer, wait_until

SHAPES = [(), (0,), (1,), (3,), (7, 13), (2, 5000)]


def _listed(scene: Scene, *trainers: Trainer) -> None:
    """Until every unit may publish."""
    scene.aggregate(until=lambda: len(scene.head.units) == len(trainers))
    wait_until(lambda: all(trainer.parts.outbox.listed.is_set() for trainer in trainers))


def _together(scene: Scene, trainers: list[Trainer], work: Callable[[Trainer], None]) -> None:
    """One step of everybody, cut and published, then merged in one pass and adopted."""
    before = {trainer.unit.name: len(scene.records(trainer.unit.name)) for trainer in trainers}
    for trainer in trainers:
        with torch.no_grad():
            work(trainer)
    fragments = len(scene.run.layout.fragments)
    wait_until(lambda: all(len(scene.records(name)) == count + fragments for name, count in before.items()))
    scene.pass_once()
    scene.sync(*trainers)


def _weights(scene: Scene) -> dict[str, torch.Tensor]:
    return read_weights(scene.run, scene.head)


# shapes and codecs


class Shapes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        for number, shape in enumerate(SHAPES):
            self.register_parameter(f"p{number}", nn.Parameter(torch.randn(shape)))
        self.zero = nn.Parameter(torch.zeros(5, 3))


@pytest.mark.parametrize("codec", ["none", "bf16", "int8", "int4"])
def test_tensors_of_every_shape_go_through_a_whole_merge_with_every_codec(codec: str) -> None:
    scene = Scene(fragments=1, model=Shapes, sync_every=1, codec=codec, pull_codec=codec)
    start = {name: tensor.detach().clone() for name, tensor in Shapes().named_parameters()}
    torch.manual_seed(1)
    moves = {name: 0.01 * torch.randn(tensor.shape) for name, tensor in start.items()}
    moves["zero"] = torch.zeros(5, 3)
    largest = max(float(move.abs().max()) for move in moves.values() if move.numel())
    step = {"none": 1e-6, "bf16": 2.0**-8, "int8": 1 / 127, "int4": 1 / 7}[
        codec
    ] * largest  # of the coarsest block; push and pull: half of it each

    def work(trainer: Trainer) -> None:
        for name, parameter in trainer.model.named_parameters():
            parameter.add_(moves[name])
        trainer.unit.step(tokens=10)

    with scene.join("a") as trainer:
        _listed(scene, trainer)
        _together(scene, [trainer], work)
        weights = _weights(scene)
        for name, parameter in trainer.model.named_parameters():
            assert weights[name].shape == parameter.shape == start[name].shape and weights[name].dtype == torch.float32
            torch.testing.assert_close(weights[name], start[name] + moves[name], rtol=0.0, atol=1.02 * step)
            torch.testing.assert_close(parameter.detach(), weights[name], rtol=0.0, atol=1e-6)  # nothing of it is unmerged: I11
        trainer.abandon()
    assert not weights["zero"].any()


@pytest.mark.parametrize("codec", ["none", "bf16", "int8", "int4"])
def test_a_span_in_which_nothing_moved_is_merged_and_changes_no_bit(codec: str) -> None:
    scene = Scene(model=Shapes, sync_every=1, codec=codec, pull_codec=codec)
    before = scene.value().sha256()
    with scene.join("a") as trainer:
        _listed(scene, trainer)
        _together(scene, [trainer], lambda trainer: trainer.unit.step(tokens=10))
        trainer.abandon()
    assert scene.head.fragments[0].fragment_version == 1 and scene.head.fragments[0].sha256 == before == scene.value().sha256()


# buffers


def test_float_buffers_become_the_weighted_mean_and_counters_the_largest() -> None:
    scene = Scene(model=lambda: nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)), sync_every=1)
    found = {"a": (10, 4, 1.0), "b": (30, 9, 2.0)}  # tokens, batches, mean; equal steps, so the weights are 10^2 and 30^2

    def work(trainer: Trainer) -> None:
        tokens, batches, mean = found[trainer.unit.name]
        norm = trainer.model[1]  # type: ignore[index]
        assert isinstance(norm, nn.BatchNorm1d) and norm.running_mean is not None and norm.num_batches_tracked is not None
        norm.running_mean.fill_(mean)
        norm.num_batches_tracked.fill_(batches)
        trainer.unit.step(tokens=tokens)

    with scene.join("a") as a, scene.join("b") as b:
        _listed(scene, a, b)
        _together(scene, [a, b], work)
        for state in (_weights(scene), a.model.state_dict(), b.model.state_dict()):
            assert state["1.running_mean"].tolist() == pytest.approx([1.9] * 3, abs=1e-6)
            assert state["1.running_var"].tolist() == [1.0] * 3
            assert state["1.num_batches_tracked"].dtype == torch.int64 and state["1.num_batches_tracked"].item() == 9
        a.abandon()
        b.abandon()


# ties


class Tied(nn.Module):
    def __init__(self, *, tied: bool = True) -> None:
        super().__init__()
        self.tie_word_embeddings = True  # what a configuration says, whatever the tensors are
        self.embed = nn.Embedding(4, 3)
        self.head = nn.Linear(3, 4, bias=False)
        nn.init.ones_(self.embed.weight)
        nn.init.ones_(self.head.weight)
        if tied:
            self.head.weight = self.embed.weight


def test_tied_weights_move_once_and_are_still_tied_after_export_and_load(tmp_path: Path) -> None:
    scene = Scene(model=Tied, sync_every=1, store=LocalStore(tmp_path / "run"))
    with scene.join("a") as trainer:
        _listed(scene, trainer)
        _together(scene, [trainer], lambda trainer: trainer.train(1, by=-0.25))
        assert trainer.model.head.weight is trainer.model.embed.weight
        assert trainer.model.get_parameter("head.weight").unique().tolist() == [0.75]
        trainer.abandon()
    assert scene.run.layout.elements == 12

    file = tmp_path / "model.safetensors"
    with pytest.raises(SystemExit) as ended:
        app(["export", str(tmp_path / "run"), str(file)])
    assert ended.value.code == 0
    weights = safetensors.torch.load_file(file)
    fresh = Tied()
    fresh.load_state_dict(weights)
    assert fresh.head.weight is fresh.embed.weight and fresh.head.weight.unique().tolist() == [0.75]
    apart = Tied(tied=False)
    apart.load_state_dict(weights)
    assert apart.head.weight.unique().tolist() == apart.embed.weight.unique().tolist() == [0.75]


def test_weights_that_only_the_configuration_ties_are_two_and_move_apart() -> None:
    def work(trainer: Trainer) -> None:
        assert isinstance(trainer.model, Tied)
        trainer.model.embed.weight.add_(-0.5)
        trainer.model.head.weight.add_(0.25)
        trainer.unit.step(tokens=10)

    scene = Scene(model=lambda: Tied(tied=False), sync_every=1)
    with scene.join("a") as trainer:
        _listed(scene, trainer)
        _together(scene, [trainer], work)
        trainer.abandon()
    weights = _weights(scene)
    assert weights["embed.weight"].unique().tolist() == [0.5] and weights["head.weight"].unique().tolist() == [1.25]
    with pytest.raises(LayoutError, match=r"only_in_run=\['head.weight'\]"):
        scene.open("b", model=Tied())


# frozen parameters


class Lora(nn.Module):
    """A large frozen layer and two small trained factors, as adapters are."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.base = nn.Linear(50, 40).requires_grad_(False)
        self.down = nn.Parameter(torch.randn(2, 50))
        self.up = nn.Parameter(torch.zeros(40, 2))


def _frozen_first() -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 4), nn.Linear(4, 2))


def _frozen_middle() -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 2))


@pytest.mark.parametrize("fragments", [1, 2])
@pytest.mark.parametrize("build", [_frozen_first, _frozen_middle, Lora])
def test_what_is_frozen_stays_and_the_others_move_by_name(build: Callable[[], nn.Module], fragments: int) -> None:
    scene = Scene(model=build, fragments=fragments, sync_every=1)
    trained = [name for name, parameter in build().named_parameters() if parameter.requires_grad]
    start = {name: tensor.clone() for name, tensor in build().state_dict().items()}

    def work(trainer: Trainer) -> None:
        for number, name in enumerate(trained):  # each tensor by another amount, so that a shift in the pairing shows
            trainer.model.get_parameter(name).add_(number + (1.0 if trainer.unit.name == "a" else 3.0))
        trainer.unit.step(tokens=10)

    with scene.join("a") as a, scene.join("b") as b:
        _listed(scene, a, b)
        _together(scene, [a, b], work)
        for state in (_weights(scene), a.model.state_dict(), b.model.state_dict()):
            for name, tensor in state.items():
                if name in trained:
                    torch.testing.assert_close(tensor, start[name] + (trained.index(name) + 2.0))
                else:
                    assert torch.equal(tensor, start[name])
        a.abandon()
        b.abandon()
    assert scene.run.layout.elements == sum(start[name].numel() for name in trained)
    assert [len(record.sum_squares) for record in scene.records("a")] == [len(scene.run.layout.of(f)) for f in range(fragments)]


def test_unfreezing_after_joining_is_an_error_at_the_next_cut() -> None:
    scene = Scene(model=_frozen_first, sync_every=2)
    trainer = scene.open("a")
    trainer.train(2)
    trainer.model.requires_grad_(True)
    with pytest.raises(LayoutError, match=r"name=0\.weight; freeze it again"), trainer.unit:
        trainer.train(2)


# wrappers


def test_a_compiled_model_joins_a_run_of_the_plain_one() -> None:
    scene = Scene(sync_every=1)
    plain = scene.model()
    wrapped = torch.compile(plain, backend="eager")
    assert isinstance(wrapped, nn.Module)
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=0.1)
    with scene.join("a", model=wrapped, optimizer=optimizer) as trainer:
        _listed(scene, trainer)
        _together(scene, [trainer], lambda trainer: trainer.train(1, by=-2.0))
        assert torch.equal(trainer.flat(), torch.cat([p.detach().flatten() for p in scene.model().parameters()]) - 2.0)
        trainer.abandon()
    assert list(_weights(scene)) == ["p0", "p1", "p2"]


# memory that goes round


def test_memory_of_a_snapshot_is_never_read_after_it_was_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    give = HostBuffers.give

    def scribble(self: HostBuffers, view_F: torch.Tensor) -> None:
        view_F.fill_(float("nan"))
        give(self, view_F)

    monkeypatch.setattr(HostBuffers, "give", scribble)
    scene = Scene(fragments=3, sync_every=1, state_every_cuts=1)
    with scene.join("a") as a, scene.join("b") as b:
        _listed(scene, a, b)
        for _ in range(4):
            _together(scene, [a, b], lambda trainer: trainer.train(1, by=-1.0))
        for trainer in (a, b):
            trainer.train(1)
        a.parts.engine.post(Restart())
        scene.sync(a, b)
    again = scene.open("a")
    start = torch.cat([parameter.detach().flatten() for parameter in scene.model().parameters()])
    assert torch.equal(again.flat(), start - 5.0)
    again.abandon()
    again.unit.close()


# one unit is plain DiLoCo


def test_one_unit_without_compression_is_plain_diloco_with_the_same_outer_optimizer() -> None:
    lr, momentum, spans = 0.7, 0.9, 3
    scene = Scene(sync_every=4, lr=lr, momentum=momentum)
    world = torch.cat([parameter.detach().flatten() for parameter in scene.model().parameters()]).double()
    velocity = torch.zeros_like(world)
    with scene.join("a") as trainer:
        _listed(scene, trainer)
        for _ in range(spans):
            local = world.clone()
            for _ in range(4):
                with torch.no_grad():
                    for parameter in trainer.model.parameters():
                        parameter.sub_(0.1 * (parameter - 3.0))  # descends a bowl around 3
                trainer.unit.step(tokens=10)
                local -= 0.1 * (local - 3.0)
            velocity = momentum * velocity + (world - local)
            world = world - lr * (momentum * velocity + (world - local))
            scene.sync(trainer)
        torch.testing.assert_close(scene.value().params.double(), world, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(trainer.flat().double(), world, rtol=1e-6, atol=1e-6)
        trainer.abandon()
    assert scene.head.fragments[0].fragment_version == spans
