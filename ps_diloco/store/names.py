"""What every store checks about the names and ranges it is given (contract: ``store/base.py``).

Keys from a bucket are checked by the reader of the record that holds them (format §3), so a bad one here is our own bug.
"""

from __future__ import annotations

import re

from ps_diloco.errors import InvariantViolation, LimitExceeded

_TEXT = re.compile(r"[A-Za-z0-9._/=-]*", re.ASCII)
_SEGMENT = re.compile(r"[A-Za-z0-9._=-]+", re.ASCII)
KEY_LENGTH_MAX = 1000


def is_segment(text: str) -> bool:
    """Whether ``text`` may stand between two ``/`` of a key."""
    return bool(_SEGMENT.fullmatch(text)) and text not in (".", "..")


def is_key(text: str) -> bool:
    """Whether ``text`` is a key of the contract. Listings leave out objects with other names."""
    return len(text) <= KEY_LENGTH_MAX and all(is_segment(segment) for segment in text.split("/"))


def check_key(key: str) -> None:
    """Raise :class:`InvariantViolation` unless ``key`` is a key of the contract."""
    if not is_key(key):
        raise InvariantViolation("not a key: segments of [A-Za-z0-9._=-] joined by '/', none of them empty, '.' or '..'", key=repr(key))


def check_prefix(prefix: str) -> None:
    """Raise :class:`InvariantViolation` unless ``prefix`` can begin a key (``""`` can)."""
    *whole, last = prefix.split("/")
    if len(prefix) > KEY_LENGTH_MAX or not _TEXT.fullmatch(last) or not all(is_segment(segment) for segment in whole):
        raise InvariantViolation("not the beginning of a key", prefix=repr(prefix))


def check_directory(prefix: str) -> None:
    """Raise :class:`InvariantViolation` unless ``prefix`` is ``""`` or whole segments that end in ``/``."""
    check_prefix(prefix)
    if prefix and not prefix.endswith("/"):
        raise InvariantViolation("a prefix whose segments are listed ends in '/'", prefix=repr(prefix))


def check_range(byte_range: tuple[int, int] | None) -> None:
    """Raise :class:`InvariantViolation` unless ``byte_range`` is None or 0 <= start <= end."""
    if byte_range is not None and not 0 <= byte_range[0] <= byte_range[1]:
        raise InvariantViolation("not a byte range: 0 <= start <= end", byte_range=byte_range)


def clip_range(byte_range: tuple[int, int] | None, size: int) -> tuple[int, int]:
    """(start, end) of what ``byte_range`` means in an object of ``size`` bytes; (n, n) if nothing."""
    start, end = byte_range if byte_range is not None else (0, size)
    return min(start, size), min(end, size)


def check_limit(key: str, size: int, max_bytes: int | None) -> None:
    """Raise :class:`LimitExceeded` if more than ``max_bytes`` would be returned."""
    if max_bytes is not None and size > max_bytes:
        raise LimitExceeded("object is larger than its reader allows", key=key, size=size, limit=max_bytes)
