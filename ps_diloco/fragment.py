"""The value of one fragment: four flat arrays (format §3, §5.2)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ps_diloco.arrays import copy_of, zeros
from ps_diloco.hashing import fragment_hash
from ps_diloco.layout import FragmentSize


@dataclass(kw_only=True)
class FragmentValue:
    """Global or local values of a fragment, on the host.

    ``params`` float32 [F], ``floats`` float32 [B], ``ints`` int64 [I], ``frozen`` float32 [Z], all one-dimensional and contiguous.
    """

    params: torch.Tensor
    floats: torch.Tensor
    ints: torch.Tensor
    frozen: torch.Tensor

    @staticmethod
    def zeros(size: FragmentSize) -> FragmentValue:
        return FragmentValue(
            params=zeros(size.elements), floats=zeros(size.floats), ints=zeros(size.ints, torch.int64), frozen=zeros(size.frozen)
        )

    def clone(self) -> FragmentValue:
        return FragmentValue(params=copy_of(self.params), floats=copy_of(self.floats), ints=copy_of(self.ints), frozen=copy_of(self.frozen))

    def sha256(self, *, threads: int = 1) -> str:
        """Fragment hash (format §3). Reads every byte once; releases the GIL."""
        return fragment_hash(self.params, self.floats, self.ints, self.frozen, threads=threads)
