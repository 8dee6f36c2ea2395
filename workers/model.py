"""A small GPT: RMSNorm before each block, rotary positions, SwiGLU, no biases; float32.

Shapes: B batch, T time, D width, H heads, K = D / H, k = K / 2, V vocabulary, F hidden width of the MLP::

    model = build_model(ModelSettings(), seed=0)
    loss = model(tokens_BT, targets_BT)
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from workers.settings import ModelSettings

ROTARY_BASE = 10_000.0
INIT_STD = 0.02


def build_model(settings: ModelSettings, seed: int) -> GPT:
    """A float32 model on the CPU whose weights depend on nothing but ``settings`` and ``seed``; the global generator is left alone."""
    with torch.random.fork_rng(devices=[]):
        model = GPT(settings)
    model.initialize(torch.Generator().manual_seed(seed))
    return model


class GPT(nn.Module):
    """Decoder-only transformer; see :meth:`forward`."""

    def __init__(self, settings: ModelSettings) -> None:
        super().__init__()
        self.settings = settings
        self.embedding = nn.Embedding(settings.vocab, settings.width)
        self.blocks = nn.ModuleList(Block(settings) for _ in range(settings.layers))
        self.norm = nn.RMSNorm(settings.width, eps=1e-6)
        self.output = nn.Linear(settings.width, settings.vocab, bias=False)
        if settings.tied_embedding:
            self.output.weight = self.embedding.weight
        cos_Tk, sin_Tk = rotary_table(settings.context, settings.width // settings.heads)
        self.register_buffer("cos_Tk", cos_Tk, persistent=False)
        self.register_buffer("sin_Tk", sin_Tk, persistent=False)

    def forward(self, tokens_BT: Tensor, targets_BT: Tensor | None = None) -> Tensor:
        """Logits (B, T, V); with ``targets_BT`` the mean cross-entropy in nats per token, a scalar. Inputs are int64, T <= context."""
        cos_Tk, sin_Tk = self.get_buffer("cos_Tk"), self.get_buffer("sin_Tk")
        time = tokens_BT.shape[1]
        x_BTD = self.embedding(tokens_BT)
        for block in self.blocks:
            x_BTD = block(x_BTD, cos_Tk[:time], sin_Tk[:time])
        logits_BTV: Tensor = self.output(self.norm(x_BTD))
        if targets_BT is None:
            return logits_BTV
        return functional.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten())

    @torch.no_grad()
    def initialize(self, generator: torch.Generator) -> None:
        """Normal weights, the two projections into the residual stream scaled down by the depth (GPT-2); norms 1."""
        for name, parameter in self.named_parameters():
            if parameter.dim() < 2:
                nn.init.ones_(parameter)
            else:
                into_residual = name.endswith(("attention.output.weight", "mlp.down.weight"))
                std = INIT_STD / math.sqrt(2 * self.settings.layers) if into_residual else INIT_STD
                nn.init.normal_(parameter, std=std, generator=generator)


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, settings: ModelSettings) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(settings.width, eps=1e-6)
        self.attention = Attention(settings)
        self.mlp_norm = nn.RMSNorm(settings.width, eps=1e-6)
        self.mlp = MLP(settings.width)

    def forward(self, x_BTD: Tensor, cos_Tk: Tensor, sin_Tk: Tensor) -> Tensor:
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD), cos_Tk, sin_Tk)
        x_BTD = x_BTD + self.mlp(self.mlp_norm(x_BTD))
        return x_BTD


class Attention(nn.Module):
    """Causal multi-head self-attention."""

    def __init__(self, settings: ModelSettings) -> None:
        super().__init__()
        self.heads = settings.heads
        self.qkv = nn.Linear(settings.width, 3 * settings.width, bias=False)
        self.output = nn.Linear(settings.width, settings.width, bias=False)

    def forward(self, x_BTD: Tensor, cos_Tk: Tensor, sin_Tk: Tensor) -> Tensor:
        heads_BTHK = self.qkv(x_BTD).unflatten(-1, (3, self.heads, -1))
        q_BHTK, k_BHTK, v_BHTK = (part.transpose(1, 2) for part in heads_BTHK.unbind(2))
        q_BHTK, k_BHTK = rotate(q_BHTK, cos_Tk, sin_Tk), rotate(k_BHTK, cos_Tk, sin_Tk)
        mixed_BHTK = functional.scaled_dot_product_attention(q_BHTK, k_BHTK, v_BHTK, is_causal=True)
        output_BTD: Tensor = self.output(mixed_BHTK.transpose(1, 2).flatten(2))
        return output_BTD


class MLP(nn.Module):
    """SwiGLU with F near 8/3 D, so that it costs as much as a plain MLP of 4 D."""

    def __init__(self, width: int) -> None:
        super().__init__()
        hidden = max(8, round(8 * width / 3 / 8) * 8)
        self.gate_up = nn.Linear(width, 2 * hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        gate_BTF, up_BTF = self.gate_up(x_BTD).chunk(2, dim=-1)
        output_BTD: Tensor = self.down(functional.silu(gate_BTF) * up_BTF)
        return output_BTD


def rotary_table(context: int, head_width: int) -> tuple[Tensor, Tensor]:
    """cos and sin (T, K/2), float32, of the rotary position embedding (Su et al., RoFormer, eq. 34)."""
    frequency_k = ROTARY_BASE ** (-torch.arange(0, head_width, 2, dtype=torch.float64) / head_width)
    angle_Tk = torch.arange(context, dtype=torch.float64)[:, None] * frequency_k
    return angle_Tk.cos().float(), angle_Tk.sin().float()


def rotate(x_BHTK: Tensor, cos_Tk: Tensor, sin_Tk: Tensor) -> Tensor:
    """Turn each pair (k, k + K/2) of ``x_BHTK`` by its position's angle; any dimensions may stand before T."""
    first, second = x_BHTK.chunk(2, dim=-1)
    return torch.cat((first * cos_Tk - second * sin_Tk, second * cos_Tk + first * sin_Tk), dim=-1)
