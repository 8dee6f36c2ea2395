"""The outer step of one fragment (format §6.3). Pure: no I/O, no clock.

m <- mu m + g;  x = eta (mu m + g) + e;  u = Q(x);  e <- x - u;  Theta <- Theta - u.

Nesterov momentum as in DiLoCo (arXiv 2311.08105), with the quantisation error of the published update kept, so that what readers apply is exactly what the
aggregator applied. Every product is rounded before it is added: the same bits on every machine with IEEE arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ps_diloco.config import OuterSettings


@dataclass(kw_only=True)
class OuterState:
    """Momentum m and published-update error e, both [F], in the dtype of the parameters (float32 in a bucket)."""

    momentum: torch.Tensor
    error: torch.Tensor

    @staticmethod
    def zeros(elements: int, *, dtype: torch.dtype = torch.float32) -> OuterState:
        return OuterState(momentum=torch.zeros(elements, dtype=dtype), error=torch.zeros(elements, dtype=dtype))


def outer_step(
    params_F: torch.Tensor,
    state: OuterState,
    gradient_F: torch.Tensor,
    settings: OuterSettings,
    quantise: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """Take one outer step in place and return the published update u [F].

    ``quantise`` maps x to u = decode(encode(x)) as a new tensor. Changes ``params_F`` and ``state``; leaves ``gradient_F``.
    """
    state.momentum.mul_(settings.momentum).add_(gradient_F)
    x_F = state.momentum.mul(settings.momentum)
    x_F.add_(gradient_F).mul_(settings.lr).add_(state.error)
    update_F = quantise(x_F)
    torch.sub(x_F, update_F, out=state.error)
    params_F.sub_(update_F)
    return update_F
