"""The value of one fragment: four flat arrays (format §3, §5.2)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

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
            params=torch.zeros(size.elements, dtype=torch.float32),
            floats=torch.zeros(size.floats, dtype=torch.float32),
            ints=torch.zeros(size.ints, dtype=torch.int64),
            frozen=torch.zeros(size.frozen, dtype=torch.float32),
        )

    def clone(self) -> FragmentValue:
        return FragmentValue(params=self.params.clone(), floats=self.floats.clone(), ints=self.ints.clone(), frozen=self.frozen.clone())

    def sha256(self) -> str:
        """Fragment hash (format §3). Reads every byte once; releases the GIL."""
        return fragment_hash(self.params, self.floats, self.ints, self.frozen)
