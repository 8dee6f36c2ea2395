"""Data objects: unique names going in, size and hash checked coming out (format §2, §3)."""

from __future__ import annotations

import hashlib

from ps_diloco.env import Env
from ps_diloco.errors import IntegrityError, InvariantViolation, LimitExceeded
from ps_diloco.records import Ref
from ps_diloco.store.base import Store
from ps_diloco.store.claim import claim_object


def put_data(store: Store, env: Env, key: str, data: bytes) -> Ref:
    """Write a data object under a name that contains a fresh attempt id. Does I/O; safe against lost answers."""
    if not claim_object(store, env, key, data).won:
        raise InvariantViolation("an object of another content stands under a unique name", key=key)
    return Ref(key=key, size=len(data), sha256=hashlib.sha256(data).hexdigest())


def fetch(store: Store, ref: Ref, *, max_bytes: int | None = None) -> bytes:
    """Read the object that ``ref`` names. Raises :class:`LimitExceeded` before reading more than ``max_bytes``, :class:`IntegrityError` if it is not
    the object that was named, and the store's errors (:class:`NotFound` among them)."""
    if max_bytes is not None and ref.size > max_bytes:
        raise LimitExceeded("object is larger than its content can need", key=ref.key, size=ref.size, limit=max_bytes)
    data = store.get(ref.key, max_bytes=ref.size)
    if len(data) != ref.size:
        raise IntegrityError("object does not have the stated size", key=ref.key, size=len(data), stated=ref.size)
    if hashlib.sha256(data).hexdigest() != ref.sha256:
        raise IntegrityError("object does not have the stated hash", key=ref.key, stated=ref.sha256)
    return data
