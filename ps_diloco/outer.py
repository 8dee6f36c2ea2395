"""The outer step of one fragment (format §6.3). Pure: no I/O, no clock.

m <- mu m + g;  x = eta (mu m + g) + e;  u = Q(x);  e <- x - u;  Theta <- Theta - u.

Nesterov momentum as in DiLoCo (arXiv 2311.08105), with the quantisation error of the published update kept, so that what readers apply is exactly what the
aggregator applied. Every product is rounded before it is added: the same bits on every machine with IEEE arithmetic.

:func:`outer_step` states the formula, for any Q; :func:`publish_outer_step` does the same with a codec for Q, piece by piece and without an array for x or u.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ps_diloco.arrays import PIECE, check_finite, empty, in_order, pieces, zeros
from ps_diloco.config import OuterSettings
from ps_diloco.layout import LayoutEntry
from ps_diloco.merge import SumSquares
from ps_diloco.shard import CHUNK, Section, encode_section


@dataclass(kw_only=True)
class OuterState:
    """Momentum m and published-update error e, both [F], in the dtype of the parameters (float32 in a bucket)."""

    momentum: torch.Tensor
    error: torch.Tensor

    @staticmethod
    def zeros(elements: int, *, dtype: torch.dtype = torch.float32) -> OuterState:
        return OuterState(momentum=zeros(elements, dtype), error=zeros(elements, dtype))


@dataclass(frozen=True, kw_only=True, slots=True)
class Published:
    """The encoded update u, and the sums of squares of g and u for each parameter entry."""

    section: Section
    gradient_squares: tuple[float, ...]
    update_squares: tuple[float, ...]


def outer_update(
    state: OuterState, gradient_F: torch.Tensor, settings: OuterSettings, quantise: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """Carry ``state`` over one step, in place, and return the update u [F]. ``quantise`` maps x to u as a new tensor."""
    state.momentum.mul_(settings.momentum).add_(gradient_F)
    x_F = state.momentum.mul(settings.momentum)
    x_F.add_(gradient_F).mul_(settings.lr).add_(state.error)
    update_F = quantise(x_F)
    torch.sub(x_F, update_F, out=state.error)
    return update_F


def outer_step(
    params_F: torch.Tensor,
    state: OuterState,
    gradient_F: torch.Tensor,
    settings: OuterSettings,
    quantise: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """Take one outer step in place and return the published update u [F]. Changes ``params_F`` and ``state``; leaves ``gradient_F``."""
    update_F = outer_update(state, gradient_F, settings, quantise)
    params_F.sub_(update_F)
    return update_F


def publish_outer_step(
    params_F: torch.Tensor,
    state: OuterState,
    gradient_F: torch.Tensor,
    settings: OuterSettings,
    codec: str,
    entries: Sequence[LayoutEntry],
    *,
    threads: int = 1,
) -> Published:
    """:func:`outer_step` where Q is a codec, with the same bits. Changes ``params_F`` and ``state``; leaves ``gradient_F``. All are float32.

    Raises :class:`NonFinite` if the update or a new parameter is not finite: ``params_F`` and ``state`` are worth nothing then.
    """
    gradient_squares, update_squares = SumSquares(entries), SumSquares(entries)
    mu, lr, x_F = settings.momentum, settings.lr, state.error  # x takes the place of e until u is known

    def add_gradient(start: int) -> None:
        part = slice(start, start + CHUNK)
        work_P = empty(min(PIECE, gradient_F.numel()))
        for (first, g_P), (_, m_P), (_, x_P) in zip(*map(pieces, (gradient_F[part], state.momentum[part], x_F[part])), strict=True):
            m_P.mul_(mu).add_(g_P)
            step_P = torch.mul(m_P, mu, out=work_P[: g_P.numel()])
            x_P.add_(step_P.add_(g_P).mul_(lr))
            gradient_squares.add(start + first, g_P)

    def apply_update(start: int, u_P: torch.Tensor) -> None:
        part = slice(start, start + u_P.numel())
        x_F[part].sub_(u_P)
        params_P = params_F[part].sub_(u_P)
        check_finite(params_P)
        update_squares.add(start, u_P)

    in_order(add_gradient, range(0, gradient_F.numel(), CHUNK), threads=threads)
    section = encode_section("params", codec, x_F, each=apply_update, threads=threads)
    return Published(section=section, gradient_squares=gradient_squares.totals(), update_squares=update_squares.totals())
