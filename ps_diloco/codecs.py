"""Codecs of one chunk of a section (format §5.9): float32 (or int64) values <-> raw bytes. Pure; CPU.

::

    codec = CODECS["int4"]
    raw = codec.encode(values)                  # NonFinite if a value is NaN or infinite
    back = codec.decode(raw, values.numel())    # FormatError if the bytes break the format

int8 and int4 are symmetric with one scale per block of 256. The scale is bfloat16, rounded up: 8 significant bits times at most 7 give a product that is
exact in float32, so ``q * scale`` has the same bits fused or not, on CPU or GPU.
"""

from __future__ import annotations

from typing import Protocol

import torch

from ps_diloco.errors import FormatError, NonFinite
from ps_diloco.hashing import raw_bytes

BLOCK = 256
SCALE_MIN = 2.0**-100


class Codec(Protocol):
    """Encodes chunks of at most 2^22 elements, each alone."""

    name: str
    dtype: torch.dtype
    """Of decoded values: float32, or int64 for ``int64``."""

    def raw_bytes(self, elements: int) -> int:
        """Exact size of the encoding of ``elements`` values."""

    def encode(self, values: torch.Tensor) -> bytes:
        """``values``: one-dimensional, contiguous, of ``dtype``."""

    def decode(self, raw: bytes | bytearray | memoryview, elements: int) -> torch.Tensor:
        """The values as a new tensor. ``raw`` has the exact size; hostile content raises :class:`FormatError` or :class:`NonFinite`."""


def check_finite(values: torch.Tensor) -> None:
    """Raise :class:`NonFinite` naming the first bad element. One pass that allocates nothing when all is well: a sum with a NaN or infinity is not finite."""
    if values.numel() and not torch.isfinite(values.sum(dtype=torch.float64)):
        bad = (~torch.isfinite(values)).nonzero()
        raise NonFinite("values are not finite", element=int(bad[0]), value=float(values[bad[0]]), count=len(bad))


def _tensor(raw: bytes | bytearray | memoryview, dtype: torch.dtype) -> torch.Tensor:
    """A writable copy of ``raw`` as a tensor."""
    return torch.frombuffer(bytearray(raw), dtype=dtype) if len(raw) else torch.empty(0, dtype=dtype)


class NoCodec:
    name = "none"
    dtype = torch.float32

    def raw_bytes(self, elements: int) -> int:
        return 4 * elements

    def encode(self, values: torch.Tensor) -> bytes:
        check_finite(values)
        return bytes(raw_bytes(values))

    def decode(self, raw: bytes | bytearray | memoryview, elements: int) -> torch.Tensor:
        values = _tensor(raw, torch.float32)
        check_finite(values)
        return values


class Bf16:
    name = "bf16"
    dtype = torch.float32

    def raw_bytes(self, elements: int) -> int:
        return 2 * elements

    def encode(self, values: torch.Tensor) -> bytes:
        check_finite(values)
        half = values.to(torch.bfloat16)
        check_finite(half.to(torch.float32))  # the largest float32 values round to infinity
        return bytes(raw_bytes(half))

    def decode(self, raw: bytes | bytearray | memoryview, elements: int) -> torch.Tensor:
        values = _tensor(raw, torch.bfloat16).to(torch.float32)
        check_finite(values)
        return values


class Int64:
    name = "int64"
    dtype = torch.int64

    def raw_bytes(self, elements: int) -> int:
        return 8 * elements

    def encode(self, values: torch.Tensor) -> bytes:
        return bytes(raw_bytes(values))

    def decode(self, raw: bytes | bytearray | memoryview, elements: int) -> torch.Tensor:
        return _tensor(raw, torch.int64)


class BlockInt:
    """Signed integers of 8 or 4 bits with a bfloat16 scale per block."""

    dtype = torch.float32

    def __init__(self, bits: int) -> None:
        self.name = f"int{bits}"
        self._bits = bits
        self._largest = 2 ** (bits - 1) - 1

    def raw_bytes(self, elements: int) -> int:
        return 2 * -(-elements // BLOCK) + -(-elements * self._bits // 8)

    def encode(self, values: torch.Tensor) -> bytes:
        n = values.numel()
        check_finite(values)
        blocks = torch.nn.functional.pad(values, (0, -n % BLOCK)).view(-1, BLOCK)
        scales = _round_up_to_bf16(blocks.abs().amax(dim=1).div_(self._largest)) if n else torch.empty(0)
        scales.masked_fill_(scales < SCALE_MIN, 0.0)
        check_finite(scales.mul(self._largest))  # rounding up may take the largest float32 values beyond what a decoder accepts
        # x / 0 is never used: a block without a scale becomes zero
        steps = torch.where(scales > 0, scales, torch.inf).unsqueeze_(1)
        q = (blocks / steps).round_().clamp_(-self._largest, self._largest).to(torch.int8).flatten()[:n]
        payload = q if self._bits == 8 else _pack_nibbles(q)
        return bytes(raw_bytes(scales.to(torch.bfloat16))) + bytes(raw_bytes(payload))

    def decode(self, raw: bytes | bytearray | memoryview, elements: int) -> torch.Tensor:
        cut = 2 * -(-elements // BLOCK)
        scales = _tensor(memoryview(raw)[:cut], torch.bfloat16).to(torch.float32)
        if scales.numel():
            check_finite(scales.mul(self._largest))
            if bool((scales < 0).any()):
                raise FormatError("a scale is negative", codec=self.name)
        payload = memoryview(raw)[cut:]
        q = _tensor(payload, torch.int8) if self._bits == 8 else _unpack_nibbles(_tensor(payload, torch.uint8), elements)
        if elements and int(q.min()) < -self._largest:
            raise FormatError("a quantised value is out of range", codec=self.name, lowest=-self._largest)
        values = torch.nn.functional.pad(q.to(torch.float32), (0, -elements % BLOCK)).view(-1, BLOCK)
        return values.mul_(scales.unsqueeze(1)).flatten()[:elements].contiguous()


def _round_up_to_bf16(scales: torch.Tensor) -> torch.Tensor:
    """Smallest bfloat16 not below each non-negative float32, as float32."""
    return scales.view(torch.int32).add_(0xFFFF).bitwise_and_(~0xFFFF).view(torch.float32)


def _pack_nibbles(q: torch.Tensor) -> torch.Tensor:
    """Two values per byte, the even one low, each + 8; an odd tail is filled with 8."""
    shifted = torch.nn.functional.pad(q, (0, q.numel() % 2)).add_(8).to(torch.uint8).view(-1, 2)
    return shifted[:, 0] | (shifted[:, 1] << 4)


def _unpack_nibbles(packed: torch.Tensor, elements: int) -> torch.Tensor:
    pairs = torch.stack((packed & 0xF, packed >> 4), dim=1).to(torch.int8).sub_(8).flatten()
    if elements % 2 and int(pairs[-1]) != 0:
        raise FormatError("the filler of an odd chunk is not zero", codec="int4")
    return pairs[:elements]


CODECS: dict[str, Codec] = {codec.name: codec for codec in (NoCodec(), Bf16(), BlockInt(8), BlockInt(4), Int64())}
