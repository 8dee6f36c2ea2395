"""Codecs of one chunk of a section (format §5.9): float32 (or int64) values <-> raw bytes. Pure; CPU, on the calling thread alone.

::

    codec = CODECS["int4"]
    raw = codec.encode(values)                  # NonFinite if a value is NaN or infinite
    back = codec.decode(raw, values.numel())    # FormatError if the bytes break the format

Both work in pieces (:data:`ps_diloco.arrays.PIECE`) and can hand over each decoded piece while it is in the cache::

    raw = codec.encode(values, lambda start, decoded_P: values[start : start + len(decoded_P)].sub_(decoded_P))
    for start, decoded_P in codec.pieces(raw, values.numel()): ...

int8 and int4 are symmetric with one scale per block of 256. The scale is bfloat16, rounded up: 8 significant bits times at most 7 give a product that is
exact in float32, so ``q * scale`` has the same bits fused or not, on CPU or GPU.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import numpy as np
import torch

from ps_diloco.arrays import PIECE, empty, pieces
from ps_diloco.arrays import check_finite as check_finite
from ps_diloco.errors import FormatError, NonFinite
from ps_diloco.hashing import raw_bytes

BLOCK = 256
SCALE_MIN = 2.0**-100
FLOAT32_MAX = float(np.finfo(np.float32).max)
GROUP = 4
"""Pieces at once of which small work, on one number per block or on nibbles, is done: they too stay in the cache."""

Raw = bytes | bytearray | memoryview
Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Levels = np.ndarray[Any, np.dtype[np.int8]]
"""Quantised values q."""
Floats = np.ndarray[Any, np.dtype[np.float32]]
Group = list[tuple[torch.Tensor, torch.Tensor]]
"""Pieces: values [K, B] and the scales of their blocks [K, 1]."""
Each = Callable[[int, torch.Tensor], object]
"""Takes (index of the first element, piece of decoded values). The piece is the callee's to change, and used again when it returns."""


class Codec(Protocol):
    """Encodes chunks of at most 2^22 elements, each alone."""

    name: str
    dtype: torch.dtype
    """Of decoded values: float32, or int64 for ``int64``."""

    def raw_bytes(self, elements: int) -> int:
        """Exact size of the encoding of ``elements`` values."""

    def encode(self, values: torch.Tensor, each: Each | None = None) -> Raw:
        """``values``: one-dimensional, contiguous, of ``dtype``. ``each`` gets in order what a reader will get, and may change ``values`` at that place."""

    def pieces(self, raw: Raw, elements: int, out: torch.Tensor | None = None) -> Iterator[tuple[int, torch.Tensor]]:
        """Decode piece by piece into ``out``, or into memory that is used again for the next piece: (index of the first element, values).

        ``raw`` has the exact size; hostile content raises :class:`FormatError` or :class:`NonFinite`, at the latest in place of the piece that has it.
        """

    def decode(self, raw: Raw, elements: int) -> torch.Tensor:
        """All values as a new tensor. Raises as :meth:`pieces` does."""


class _Pieces(ABC):
    """Decoding whole and encoding with ``each``, for codecs that decode in pieces."""

    dtype = torch.float32

    @abstractmethod
    def pieces(self, raw: Raw, elements: int, out: torch.Tensor | None = None) -> Iterator[tuple[int, torch.Tensor]]:
        """As in :class:`Codec`."""

    def decode(self, raw: Raw, elements: int) -> torch.Tensor:
        values = empty(elements, self.dtype)
        for _ in self.pieces(raw, elements, values):
            pass
        return values

    def _hand_over(self, raw: Raw, elements: int, each: Each | None) -> None:
        if each is not None:
            for start, piece in self.pieces(raw, elements):
                each(start, piece)


class _Plain(_Pieces):
    """The bytes of the values as they are."""

    def raw_bytes(self, elements: int) -> int:
        return self.dtype.itemsize * elements

    def encode(self, values: torch.Tensor, each: Each | None = None) -> bytes:
        self._check(values)
        raw = bytes(raw_bytes(values))
        self._hand_over(raw, values.numel(), each)
        return raw

    def pieces(self, raw: Raw, elements: int, out: torch.Tensor | None = None) -> Iterator[tuple[int, torch.Tensor]]:
        target = empty(min(elements, PIECE), self.dtype) if out is None else out
        stored = np.frombuffer(raw, target.numpy().dtype)
        for start in range(0, elements, PIECE):
            source = stored[start : start + PIECE]
            piece = target[: len(source)] if out is None else target[start : start + PIECE]
            np.copyto(piece.numpy(), source)
            self._check(piece)
            yield start, piece

    def _check(self, values: torch.Tensor) -> None:
        """Refuse what this codec does not carry."""


class NoCodec(_Plain):
    name = "none"

    def _check(self, values: torch.Tensor) -> None:
        check_finite(values)


class Int64(_Plain):
    name = "int64"
    dtype = torch.int64


class Bf16(_Pieces):
    name = "bf16"

    def raw_bytes(self, elements: int) -> int:
        return 2 * elements

    def encode(self, values: torch.Tensor, each: Each | None = None) -> bytes:
        half = torch.empty(values.numel(), dtype=torch.bfloat16)
        for (start, piece), (_, rounded) in zip(pieces(values), pieces(half), strict=True):
            rounded.copy_(piece)
            if not _finite_bf16(rounded.view(torch.int16).numpy()):  # the largest float32 values, too, round to infinity
                check_finite(values[start:])
                check_finite(half[: start + PIECE].to(torch.float32))
        raw = bytes(raw_bytes(half))
        self._hand_over(raw, values.numel(), each)
        return raw

    def pieces(self, raw: Raw, elements: int, out: torch.Tensor | None = None) -> Iterator[tuple[int, torch.Tensor]]:
        target = empty(min(elements, PIECE)) if out is None else out
        stored = np.frombuffer(raw, np.uint16)
        for start in range(0, elements, PIECE):
            source = stored[start : start + PIECE]
            piece = target[: len(source)] if out is None else target[start : start + PIECE]
            bits = piece.numpy().view(np.uint32)
            np.copyto(bits, source)
            np.left_shift(bits, 16, out=bits)
            if not _finite_bf16(source):
                check_finite(piece)
            yield start, piece


def _finite_bf16(bits: np.ndarray[Any, Any]) -> bool:
    """Whether none of these bfloat16 is NaN or infinite: they alone have all bits of the exponent."""
    return int((bits & 0x7F80).max()) < 0x7F80


class BlockInt(_Pieces):
    """Signed integers of 8 or 4 bits with a bfloat16 scale per block. Shape letters: P elements of a piece, K blocks of B = 256 elements in it."""

    def __init__(self, bits: int) -> None:
        self.name = f"int{bits}"
        self._bits = bits
        self._largest = 2 ** (bits - 1) - 1

    def raw_bytes(self, elements: int) -> int:
        return 2 * -(-elements // BLOCK) + -(-elements * self._bits // 8)

    def encode(self, values: torch.Tensor, each: Each | None = None) -> memoryview:
        n = values.numel()
        raw = np.empty(self.raw_bytes(n), np.uint8)
        stored, payload = _parts(raw, n)
        scales, q, work, start = np.empty(stored.size, np.float32), np.empty(min(n, GROUP * PIECE), np.int8), _Work(n), 0
        rows = list(zip(_rows(values, n), _rows(torch.from_numpy(scales), n, 1), strict=True))
        for group in (rows[i : i + GROUP] for i in range(0, len(rows), GROUP)):
            stop = start + sum(x_KB.numel() for x_KB, _ in group)
            blocks = slice(start // BLOCK, -(-stop // BLOCK))
            self._find_scales(group, scales[blocks], values, work)
            stored[blocks] = scales[blocks].view(np.uint32) >> 16
            scales[blocks] += scales[blocks] == 0  # x / 0 is never used: a block without a scale becomes zero with any other
            self._quantise(group, q[: stop - start], work, each, start)
            self._pack(q[: stop - start], payload, start)
            start = stop
        return raw.data

    def pieces(self, raw: Raw, elements: int, out: torch.Tensor | None = None) -> Iterator[tuple[int, torch.Tensor]]:
        stored, payload = _parts(np.frombuffer(raw, np.uint8), elements)
        scales = torch.from_numpy((stored.astype(np.uint32) << 16).view(np.float32))
        check_finite(scales.mul(self._largest))
        if bool((scales < 0).any()):
            raise FormatError("a scale is negative", codec=self.name)
        rows, targets, work, start = _rows(scales, elements, 1), None if out is None else _rows(out, elements), _Work(elements), 0
        for index, scale_K1 in enumerate(rows):
            if index % GROUP == 0:
                q, first = self._unpack(payload, start, min(start + GROUP * PIECE, elements)), start
            q_P = q[start - first :][: BLOCK * len(scale_K1)]
            if targets is None:
                work.take_shape((len(scale_K1), q_P.size // len(scale_K1)))
            else:
                work.take(targets[index])
            np.copyto(work.array_P, q_P)
            work.rows_KB.mul_(scale_K1)
            yield start, work.flat_P
            start += q_P.size

    def _find_scales(self, group: Group, scales: Floats, values: torch.Tensor, work: _Work) -> None:
        """Write ``scales``, those of a group: bfloat16 as float32, 0 for a block of values that are too small. ``values``: the chunk, for messages."""
        for x_KB, scale_K1 in group:
            work.take_shape(x_KB.shape)
            torch.amax(torch.abs(x_KB, out=work.rows_KB), dim=1, keepdim=True, out=scale_K1)
        if not math.isfinite(scales.max()):
            check_finite(values)
        scales /= np.float32(self._largest)
        bits = scales.view(np.uint32)  # rounded up to bfloat16: the smallest one that is not below
        bits += 0xFFFF
        bits &= 0xFFFF0000
        scales *= scales >= SCALE_MIN
        if float(scales.max()) * self._largest > FLOAT32_MAX:
            raise NonFinite(
                "values are so large that their scale is not finite", codec=self.name, value=float(scales.max()) * self._largest
            )

    def _quantise(self, group: Group, q: Levels, work: _Work, each: Each | None, first: int) -> None:
        """Write ``q``, those of a group whose first element is ``first``, and hand over what a reader will make of them."""
        start = 0
        for x_KB, scale_K1 in group:
            work.take_shape(x_KB.shape)
            q_P = q[start : start + work.array_P.size]
            torch.div(x_KB, scale_K1, out=work.rows_KB)
            np.rint(work.array_P, out=work.array_P)
            # in range: a scale is rounded up, so that |x| / scale exceeds the largest q by an ulp at most
            np.copyto(q_P, work.array_P, casting="unsafe")
            if each is not None:
                np.copyto(work.array_P, q_P)
                work.rows_KB.mul_(scale_K1)
                each(first + start, work.flat_P)
            start += q_P.size

    def _pack(self, q: Levels, payload: Bytes, first: int) -> None:
        if self._bits == 8:
            np.copyto(payload[first : first + q.size], q.view(np.uint8))
        else:
            _pack_nibbles(q, payload[first // 2 : (first + q.size + 1) // 2])

    def _unpack(self, payload: Bytes, first: int, stop: int) -> Levels:
        if self._bits == 8:
            q: Levels = payload[first:stop].view(np.int8)
        else:
            q = _unpack_nibbles(payload[first // 2 : (stop + 1) // 2], stop - first)
        if int(q.min()) < -self._largest:
            raise FormatError("a quantised value is out of range", codec=self.name, lowest=-self._largest)
        return q


class _Work:
    """Memory of one piece of float32, as the views that torch and numpy want. It keeps them: making views anew costs as much as the work on a piece."""

    def __init__(self, elements: int) -> None:
        self._memory = empty(min(elements, PIECE))
        self.take(self._memory.view(1, -1))

    def take_shape(self, shape: tuple[int, ...]) -> None:
        if shape != self.rows_KB.shape:
            self.take(self._memory[: shape[0] * shape[1]].view(shape))

    def take(self, rows_KB: torch.Tensor) -> None:
        """Be this part of another array."""
        self.rows_KB = rows_KB
        self.flat_P = rows_KB.view(-1)
        self.array_P = self.flat_P.numpy()


def _rows(array: torch.Tensor, elements: int, width: int = BLOCK) -> list[torch.Tensor]:
    """The pieces of an array that has ``width`` numbers for each whole block of ``elements``: views [K, width], then one row of what is left over."""
    whole = elements // BLOCK * width
    views = list(torch.split(array[:whole].view(-1, width), PIECE // BLOCK)) if whole else []
    return [*views, array[whole:].view(1, -1)] if whole < array.numel() else views


def _parts(raw: Bytes, elements: int) -> tuple[np.ndarray[Any, np.dtype[np.uint16]], Bytes]:
    """Views of the scales and of the payload."""
    cut = 2 * -(-elements // BLOCK)
    return raw[:cut].view(np.uint16), raw[cut:]


def _pack_nibbles(q: Levels, packed: Bytes) -> None:
    """Two values per byte, the even one low, each + 8; an odd tail is filled with 8. Changes ``q``."""
    q += 8
    whole = q.size // 2
    pairs = q[: 2 * whole].view(np.uint16)  # the even code in the low byte, the odd one in the high byte
    shifted = pairs >> 4
    shifted |= pairs
    np.copyto(packed[:whole], shifted, casting="unsafe")
    if q.size % 2:
        packed[whole] = 8 << 4 | int(q[-1])


def _unpack_nibbles(packed: Bytes, elements: int) -> Levels:
    pairs = packed.astype(np.uint16)
    pairs |= pairs << 4
    pairs &= 0x0F0F
    q = pairs.view(np.int8)
    q -= 8
    if elements % 2 and q[-1] != 0:
        raise FormatError("the filler of an odd chunk is not zero", codec="int4")
    return q[:elements]


CODECS: dict[str, Codec] = {codec.name: codec for codec in (NoCodec(), Bf16(), BlockInt(8), BlockInt(4), Int64())}
