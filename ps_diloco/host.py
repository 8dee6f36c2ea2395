"""Host memory that is used again.

A copy into fresh memory costs several times the copy itself, in page faults, and pinned memory is dearer still. So snapshots, and an aggregator's next
parameters and outer state, are written into a few buffers that go round: one thread takes one, and whoever has read the last of it gives it back::

    buffers = HostBuffers(elements, pinned=False)
    view_F = buffers.take(n)                  # training thread
    buffers.give(view_F)                      # any thread; nobody may read it afterwards
"""

from __future__ import annotations

from collections import deque

import torch

from ps_diloco.arrays import empty


class HostBuffers:
    """Float32 buffers of ``elements`` each, at most ``kept`` of them free. Whoever holds one owns it; one that is never given back is freed. Thread-safe."""

    def __init__(self, elements: int, *, kept: int = 2, pinned: bool = False) -> None:
        self._elements = elements
        self._pinned = pinned
        self._free: deque[torch.Tensor] = deque(maxlen=kept)

    def take(self, n: int) -> torch.Tensor:
        """[n], values undefined."""
        try:
            buffer = self._free.pop()
        except IndexError:
            pinned = self._pinned
            buffer = torch.empty(self._elements, dtype=torch.float32, pin_memory=True) if pinned else empty(self._elements)
        return buffer[:n]

    def give(self, view_F: torch.Tensor) -> None:
        """Give back what :meth:`take` returned; anything else is left alone."""
        storage = view_F.untyped_storage()
        if storage.nbytes() == 4 * self._elements:
            self._free.append(torch.empty(0, dtype=torch.float32).set_(storage))
