"""The zstd stage of shards and anchors (format §5.9): with checksum and content size, never trusted when read."""

from __future__ import annotations

import numpy as np
from numcodecs.zstd import Zstd

from ps_diloco.errors import IntegrityError

LEVEL = 1
FAST = -1
"""Float32 numbers lose 7 % of their size at level 1, and that takes four times as long as at this one: worth it for what crosses regions."""
_ZSTD = {level: Zstd(level=level, checksum=True) for level in (LEVEL, FAST)}


def compress(raw: bytes | bytearray | memoryview, level: int = LEVEL) -> bytes:
    """One frame that states its content size and carries a checksum."""
    return bytes(_ZSTD[level].encode(raw))


def decompress(frame: bytes | memoryview, raw_size: int, *, of: str) -> memoryview:
    """Decode one frame into exactly ``raw_size`` bytes; the size that the frame declares is compared before anything is allocated.

    Raises :class:`IntegrityError`; ``of`` names the object in its message.
    """
    declared = declared_size(frame)
    if declared != raw_size:
        raise IntegrityError(
            "compressed chunk does not declare the size and checksum that its codec requires", of=of, declared=declared, expected=raw_size
        )
    raw = np.empty(raw_size, dtype=np.uint8)
    try:
        _ZSTD[LEVEL].decode(frame, out=raw)
    except (RuntimeError, ValueError) as error:
        raise IntegrityError("compressed chunk is damaged", of=of, cause=error) from None
    return raw.data


def declared_size(frame: bytes | memoryview) -> int | None:
    """Content size stated by a zstd frame (RFC 8878 §3.1.1.1), or None unless it has a size and a checksum and no dictionary."""
    if len(frame) < 6 or bytes(frame[:4]) != b"\x28\xb5\x2f\xfd":
        return None
    descriptor = frame[4]
    single_segment = descriptor >> 5 & 1
    if descriptor & 0b1011 or not descriptor & 0b100:
        return None
    width = (1 if single_segment else 0, 2, 4, 8)[descriptor >> 6]
    start = 5 if single_segment else 6
    if width == 0 or len(frame) < start + width:
        return None
    return int.from_bytes(frame[start : start + width], "little") + (256 if width == 2 else 0)
