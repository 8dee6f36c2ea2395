"""Hashes of arrays (format §3). CPU only; ``hashlib`` releases the GIL, so threads hash in parallel."""

from __future__ import annotations

import hashlib

import torch

from ps_diloco.arrays import in_order

TREE_BLOCK = 1 << 24


def raw_bytes(array: torch.Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, without a copy (little-endian, as every machine torch runs on)."""
    return array.detach().view(torch.uint8).numpy().data if array.numel() else memoryview(b"")


def tree_hash(array: torch.Tensor, *, threads: int = 1) -> bytes:
    """SHA-256 over the SHA-256 digests of blocks of 2^24 bytes; one empty block for an empty array."""
    data = raw_bytes(array)

    def digest(start: int) -> bytes:
        return hashlib.sha256(data[start : start + TREE_BLOCK]).digest()

    digests = in_order(digest, range(0, max(len(data), 1), TREE_BLOCK), threads=threads)
    return hashlib.sha256(b"".join(digests)).digest()


def fragment_hash(params: torch.Tensor, floats: torch.Tensor, ints: torch.Tensor, frozen: torch.Tensor, *, threads: int = 1) -> str:
    """Fragment hash, hexadecimal, of the four flat arrays."""
    return hashlib.sha256(b"".join(tree_hash(array, threads=threads) for array in (params, floats, ints, frozen))).hexdigest()
