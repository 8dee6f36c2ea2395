"""Your own training loop as a unit of a run.

python examples/own_loop.py RUN --create          # once: the run, with this model as version 0
ps-diloco aggregate RUN                           # somewhere
python examples/own_loop.py RUN --name us-east-1a # on every machine, each with its own name
"""

from __future__ import annotations

import argparse
import signal

import torch
from torch import nn

import ps_diloco


def build_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 1))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("run", help="s3://bucket/prefix, file:///path, or a plain path")
    parser.add_argument("--create", action="store_true")
    parser.add_argument("--name", default="a")
    arguments = parser.parse_args()
    model = build_model()
    if arguments.create:
        ps_diloco.create(arguments.run, model, {"target_tokens": 200_000, "unit": {"sync_every": 50}})
        return
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loss = torch.tensor(float("nan"))

    with ps_diloco.join(arguments.run, model, optimizer, unit=arguments.name) as unit:
        signal.signal(signal.SIGTERM, lambda *_: unit.stop())
        while not unit.done:
            x = torch.randn(64, 16)
            loss = ((model(x) - x.sin().sum(dim=1, keepdim=True)) ** 2).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            unit.step(tokens=64, loss=loss.item())
    print(f"{unit.name}: {unit.steps} steps, version {unit.version}, last loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
