"""Long arrays on the host: where their memory comes from, and how they are worked through.

One operation over a long array costs as much as fetching the array from memory. Cut into pieces that stay in a core's cache, all operations together do::

    for start, piece_P in pieces(values_F):
        piece_P.mul_(2.0).add_(1.0)

CPU only, no I/O. Everything here and everything that works piece by piece uses the calling thread alone, so that a unit's background threads leave the
cores to the training; who owns the machine spreads chunks over threads with :func:`in_order`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np
import torch

from ps_diloco.errors import NonFinite

PIECE = 127 * 256
"""Elements of a piece: 127 KiB of float32. Whole blocks of 256, and the most below 2^15, where torch begins to spread one operation over its threads."""
_ALIGNMENT = 64
Item = TypeVar("Item")
Result = TypeVar("Result")


def empty(elements: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A new flat tensor. Its memory is numpy's, which asks the kernel for huge pages: the first touch costs a third of what it does with ``torch.empty``."""
    return _aligned(np.empty, elements, dtype)


def zeros(elements: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """As :func:`empty`, of zeros; the kernel clears the pages when they are first used."""
    return _aligned(np.zeros, elements, dtype)


def copy_of(values: torch.Tensor) -> torch.Tensor:
    """A new flat tensor of equal content."""
    copy = empty(values.numel(), values.dtype)
    copy_into(copy, values)
    return copy


def copy_into(target: torch.Tensor, values: torch.Tensor) -> None:
    for (_, target_P), (_, values_P) in zip(pieces(target), pieces(values), strict=True):
        target_P.copy_(values_P)


def add_to(target: torch.Tensor, values: torch.Tensor) -> None:
    """``target += values``."""
    for (_, target_P), (_, values_P) in zip(pieces(target), pieces(values), strict=True):
        target_P.add_(values_P)


def _aligned(allocate: Callable[..., np.ndarray], elements: int, dtype: torch.dtype) -> torch.Tensor:
    memory = allocate(elements * dtype.itemsize + _ALIGNMENT, dtype=np.uint8)
    first = -memory.ctypes.data % _ALIGNMENT
    return torch.from_numpy(memory[first : first + elements * dtype.itemsize]).view(dtype)


def pieces(values: torch.Tensor, at_once: int = PIECE) -> Iterator[tuple[int, torch.Tensor]]:
    """Views of a flat tensor, in order: (index of the first element, at most ``at_once`` elements)."""
    if values.numel():
        yield from zip(range(0, values.numel(), at_once), torch.split(values, at_once), strict=True)


def check_finite(values: torch.Tensor) -> None:
    """Raise :class:`NonFinite` naming the first bad element."""
    array = values.detach().numpy()
    for start in range(0, array.size, PIECE):
        if not np.isfinite(array[start : start + PIECE]).all():
            bad = (~torch.isfinite(values)).nonzero()
            raise NonFinite("values are not finite", element=int(bad[0]), value=float(values[bad[0]]), count=len(bad))


def total(values: torch.Tensor) -> float:
    """Sum in float64."""
    return math.fsum(float(piece_P.sum(dtype=torch.float64)) for _, piece_P in pieces(values))


def in_order(function: Callable[[Item], Result], items: Sequence[Item], *, threads: int = 1) -> list[Result]:
    """``[function(item) for item in items]``, by this thread or by ``threads`` others at once. The error of the first item that has one is raised."""
    if threads <= 1 or len(items) <= 1:
        return [function(item) for item in items]
    with ThreadPoolExecutor(min(threads, len(items)), "ps-diloco-arrays") as pool:
        try:
            return list(pool.map(function, items))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
