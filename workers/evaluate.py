"""Held-out loss: one number that is comparable between all units of a run, since all evaluate on the same windows."""

from __future__ import annotations

import torch
from torch import nn

from workers.data import Corpus


@torch.no_grad()
def held_out_loss(model: nn.Module, corpus: Corpus, *, batches: int, batch_size: int, context: int) -> float:
    """Mean cross-entropy in nats per byte over at most ``batches`` fixed held-out batches. No I/O; leaves the model's mode as it was."""
    device = next(model.parameters()).device
    training = model.training
    model.eval()
    try:
        total, windows = 0.0, 0
        for tokens_BT, targets_BT in corpus.held_out_batches(batches, batch_size=batch_size, context=context):
            loss = model(tokens_BT.to(device), targets_BT.to(device))
            total += float(loss) * len(tokens_BT)
            windows += len(tokens_BT)
    finally:
        model.train(training)
    return total / windows
