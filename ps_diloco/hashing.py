"""Hashes of arrays (format §3). CPU only; ``hashlib`` releases the GIL, so threads hash in parallel."""

from __future__ import annotations

import hashlib

import torch

TREE_BLOCK = 1 << 24


def raw_bytes(array: torch.Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, without a copy (little-endian, as every machine torch runs on)."""
    return array.detach().view(torch.uint8).numpy().data if array.numel() else memoryview(b"")


def tree_hash(array: torch.Tensor) -> bytes:
    """SHA-256 over the SHA-256 digests of blocks of 2^24 bytes; one empty block for an empty array."""
    data = raw_bytes(array)
    digests = [hashlib.sha256(data[start : start + TREE_BLOCK]).digest() for start in range(0, len(data), TREE_BLOCK)]
    return hashlib.sha256(b"".join(digests) if digests else hashlib.sha256(b"").digest()).digest()


def fragment_hash(params: torch.Tensor, floats: torch.Tensor, ints: torch.Tensor, frozen: torch.Tensor) -> str:
    """Fragment hash, hexadecimal, of the four flat arrays."""
    return hashlib.sha256(b"".join(tree_hash(array) for array in (params, floats, ints, frozen))).hexdigest()
