"""The GPT: deterministic, causal, and it learns."""

from __future__ import annotations

import math

import pytest
import torch

from ps_diloco.errors import ConfigError, UserError
from ps_diloco.layout import build_layout
from workers.data import Corpus, load_corpus
from workers.model import build_model, rotary_table, rotate
from workers.settings import DataSettings, ModelSettings, ProgramSettings, TrainSettings
from workers.train import StepReport, Trainer, choose_device, program_of, train_alone

TINY = ModelSettings(context=16, layers=2, heads=2, width=32)


def test_default_size() -> None:
    count = sum(parameter.numel() for parameter in build_model(ModelSettings(), seed=0).parameters())
    assert count == 824_448


def test_initialization_depends_on_the_seed_alone() -> None:
    before = torch.random.get_rng_state()
    first = build_model(TINY, seed=7)
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.manual_seed(99)
    same, other = build_model(TINY, seed=7), build_model(TINY, seed=8)
    for name, value in first.state_dict().items():
        assert value.dtype == torch.float32
        assert torch.equal(value, same.state_dict()[name]), name
        assert value.dim() < 2 or not torch.equal(value, other.state_dict()[name]), name


def test_initial_scale_of_residual_projections() -> None:
    model = build_model(ModelSettings(layers=8), seed=0)
    weights = dict(model.named_parameters())
    assert float(weights["blocks.3.attention.qkv.weight"].detach().std()) == pytest.approx(0.02, rel=0.05)
    for name in ("attention.output", "mlp.down"):
        assert float(weights[f"blocks.3.{name}.weight"].detach().std()) == pytest.approx(0.02 / 4, rel=0.05)


@pytest.mark.parametrize("tied", [True, False])
def test_layout_sees_the_tie_and_no_table(tied: bool) -> None:
    layout = build_layout(build_model(TINY.model_copy(update={"tied_embedding": tied}), seed=0), num_fragments=2)
    names = {entry.name: entry for entry in layout.entries}
    assert not any("cos" in name or "sin" in name for name in names)
    assert names["embedding.weight"].aliases == (("output.weight",) if tied else ())
    assert ("output.weight" in names) is not tied


def test_a_future_token_does_not_change_past_logits() -> None:
    model = build_model(TINY, seed=0)
    tokens_BT = torch.randint(0, 256, (3, 16), generator=torch.Generator().manual_seed(1))
    changed_BT = tokens_BT.clone()
    changed_BT[:, 10] = (changed_BT[:, 10] + 1) % 256
    with torch.no_grad():
        logits_BTV, changed_BTV = model(tokens_BT), model(changed_BT)
    assert logits_BTV.shape == (3, 16, 256)
    torch.testing.assert_close(logits_BTV[:, :10], changed_BTV[:, :10], rtol=0, atol=1e-6)
    assert (logits_BTV[:, 10:] - changed_BTV[:, 10:]).abs().amax(dim=(0, 2)).min() > 1e-5


def test_a_shorter_sequence_gives_the_same_logits() -> None:
    model = build_model(TINY, seed=0)
    tokens_BT = torch.arange(32).view(2, 16)
    with torch.no_grad():
        torch.testing.assert_close(model(tokens_BT[:, :5]), model(tokens_BT)[:, :5], rtol=0, atol=1e-6)


def test_loss_is_the_mean_cross_entropy() -> None:
    model = build_model(TINY, seed=0)
    tokens_BT = torch.randint(0, 256, (2, 16), generator=torch.Generator().manual_seed(1))
    targets_BT = torch.randint(0, 256, (2, 16), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        logits_BTV, loss = model(tokens_BT), model(tokens_BT, targets_BT)
    by_hand = -logits_BTV.double().log_softmax(-1).gather(-1, targets_BT[..., None]).mean()
    assert float(loss) == pytest.approx(float(by_hand), rel=1e-5)
    assert float(loss) == pytest.approx(math.log(256), rel=0.05)


def test_rotation_keeps_length_and_depends_on_distance_only() -> None:
    cos_Tk, sin_Tk = rotary_table(32, 8)
    generator = torch.Generator().manual_seed(3)
    q_TK, k_TK = (torch.randn(1, 8, generator=generator).expand(32, 8) for _ in range(2))
    turned_q_TK, turned_k_TK = rotate(q_TK, cos_Tk, sin_Tk), rotate(k_TK, cos_Tk, sin_Tk)
    torch.testing.assert_close(turned_q_TK.norm(dim=-1), q_TK.norm(dim=-1))
    scores_TT = turned_q_TK @ turned_k_TK.T
    torch.testing.assert_close(scores_TT[5:, :-5].diagonal(), scores_TT[5, 0].expand(27), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(turned_q_TK[0], q_TK[0])


def test_the_loss_falls_on_real_text() -> None:
    program = ProgramSettings(
        model=ModelSettings(context=64, layers=2, heads=2, width=64),
        data=DataSettings(source="stdlib"),
        train=TrainSettings(device="cpu", eval_batches=4, lr=3e-3),
    )
    corpus = load_corpus(program.data, context=64)
    trainer = Trainer.build(program, seed=0, unit="a", corpus=corpus)
    before = trainer.held_out_loss()
    losses = [trainer.step(3e-3) for _ in range(60)]
    after = trainer.held_out_loss()
    assert before > 5.0
    assert after < 3.2
    assert sum(losses[-10:]) / 10 < 3.3
    assert trainer.model.training


TINY_PROGRAM = ProgramSettings(model=TINY, train=TrainSettings(device="cpu", batch_size=2, eval_batches=2, warmup_fraction=0.0))


def tiny_corpus() -> Corpus:
    text_N = torch.arange(2000, dtype=torch.int64).remainder(7).to(torch.uint8)
    return Corpus(source="test", train_N=text_N, held_out_N=text_N[:200].clone())


def test_training_alone_is_repeatable_and_follows_ramp_and_schedule() -> None:
    reports: list[StepReport] = []
    first = train_alone(TINY_PROGRAM, 3, 20, join_warmup_steps=4, corpus=tiny_corpus(), on_report=reports.append)
    assert first == train_alone(TINY_PROGRAM, 3, 20, join_warmup_steps=4, corpus=tiny_corpus())
    assert first < 4.5
    assert reports[0].loss > 5.0
    assert [report.step for report in reports] == list(range(1, 21))
    assert {report.tokens for report in reports} == {32}
    assert [report.lr for report in reports[:2]] == pytest.approx([2e-3 / 4, 2e-3 / 2], rel=0.02)
    assert max(report.lr for report in reports) == reports[3].lr
    assert reports[-1].lr == pytest.approx(2e-4, rel=0.1)


def test_a_gradient_that_is_not_finite_leaves_the_parameters_alone() -> None:
    trainer = Trainer.build(TINY_PROGRAM, seed=0, unit="a", corpus=tiny_corpus())
    before = [parameter.detach().clone() for parameter in trainer.model.parameters()]
    handle = trainer.model.register_forward_hook(lambda _module, _inputs, output: output * float("nan"))
    with pytest.raises(UserError, match="the gradient is not finite: loss=nan"):
        trainer.step(1e-3)
    handle.remove()
    for old, new in zip(before, trainer.model.parameters(), strict=True):
        assert torch.equal(old, new)


def test_only_matrices_decay() -> None:
    trainer = Trainer.build(TINY_PROGRAM, seed=0, unit="a", corpus=tiny_corpus())
    decay = {parameter: group["weight_decay"] for group in trainer.optimizer.param_groups for parameter in group["params"]}
    assert len(decay) == len(list(trainer.model.parameters()))
    assert {parameter.dim(): value for parameter, value in decay.items()} == {1: 0.0, 2: 0.1}


def test_a_device_that_is_not_there_is_named() -> None:
    assert choose_device("cpu") == torch.device("cpu")
    with pytest.raises(ConfigError, match="this machine does not have the device: device=cuda:99"):
        choose_device("cuda:99")


def test_a_run_of_another_program_is_refused() -> None:
    assert program_of(TINY_PROGRAM.model_dump(mode="json"), source="run.json") == TINY_PROGRAM
    with pytest.raises(ConfigError, match="made for another training program"):
        program_of({}, source="run.json")
