"""The codecs of format §5.9 written straight down, over whole chunks: what the package's own, which work in pieces, must equal bit for bit."""

from __future__ import annotations

import torch

from ps_diloco.codecs import BLOCK, SCALE_MIN


def encode(codec: str, values: torch.Tensor) -> bytes:
    if codec in ("none", "int64"):
        return values.numpy().tobytes()
    if codec == "bf16":
        return values.to(torch.bfloat16).view(torch.int16).numpy().tobytes()
    largest, n = {"int8": 127, "int4": 7}[codec], values.numel()
    if not n:
        return b""
    blocks = torch.nn.functional.pad(values, (0, -n % BLOCK)).view(-1, BLOCK)
    scales = blocks.abs().amax(dim=1).div_(largest).view(torch.int32).add_(0xFFFF).bitwise_and_(~0xFFFF).view(torch.float32)
    scales.masked_fill_(scales < SCALE_MIN, 0.0)
    steps = torch.where(scales > 0, scales, torch.inf).unsqueeze_(1)
    q = (blocks / steps).round_().clamp_(-largest, largest).to(torch.int8).flatten()[:n]
    if codec == "int4":
        codes = torch.nn.functional.pad(q, (0, n % 2)).add_(8).to(torch.uint8).view(-1, 2)
        q = codes[:, 0] | (codes[:, 1] << 4)
    return scales.to(torch.bfloat16).view(torch.int16).numpy().tobytes() + q.numpy().tobytes()


def decode(codec: str, raw: bytes, elements: int) -> torch.Tensor:
    if not elements:
        return torch.empty(0, dtype=torch.int64 if codec == "int64" else torch.float32)
    raw = bytearray(raw)
    if codec in ("none", "int64"):
        return torch.frombuffer(raw, dtype=torch.int64 if codec == "int64" else torch.float32)
    if codec == "bf16":
        return torch.frombuffer(raw, dtype=torch.bfloat16).to(torch.float32)
    cut = 2 * -(-elements // BLOCK)
    scales = torch.frombuffer(raw[:cut], dtype=torch.bfloat16).to(torch.float32)
    q = torch.frombuffer(raw[cut:], dtype=torch.int8)
    if codec == "int4":
        packed = q.view(torch.uint8)
        q = torch.stack((packed & 0xF, packed >> 4), dim=1).to(torch.int8).sub_(8).flatten()
    padded = torch.nn.functional.pad(q[:elements].to(torch.float32), (0, -elements % BLOCK)).view(-1, BLOCK)
    return padded.mul_(scales.unsqueeze(1)).flatten()[:elements].contiguous()
