"""The claim rule (format §2): the only way in which a numbered object is written.

::

    claim = claim_object(store, env, keys.manifest(0, 8), body)
    if claim.won: ...          # our bytes stand there, whatever the answers were
    else: theirs = claim.body  # somebody else's do
"""

from __future__ import annotations

from dataclasses import dataclass

from ps_diloco import keys
from ps_diloco.env import Backoff, Env
from ps_diloco.errors import AlreadyExists, NotFound, Unavailable, UnsupportedStore
from ps_diloco.store.base import Store

TRIES_MAX = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Claim:
    """Definite outcome: ``won`` says whether the bytes under ``key`` are ours; ``body`` is what stands there."""

    key: str
    won: bool
    body: bytes


def claim_object(store: Store, env: Env, key: str, body: bytes, *, max_bytes: int | None = None) -> Claim:
    """Create ``key`` with ``body`` exactly once, telling own success from a lost race even when answers are lost.

    ``body`` MUST contain a fresh attempt id. Does I/O; bounded by ``TRIES_MAX`` creates. Raises :class:`Unavailable`
    (``maybe_applied=True``) when there is no definite answer: then only the same bytes may be tried again under this key.
    """
    backoff = Backoff(env=env, first_s=0.05, max_s=2.0)
    maybe_applied = False
    last: Unavailable | None = None
    for attempt in range(TRIES_MAX):
        if attempt:
            env.clock.sleep(backoff.next_s())
        try:
            store.put(key, body)
            return Claim(key=key, won=True, body=body)
        except AlreadyExists:
            pass
        except Unavailable as error:
            maybe_applied = maybe_applied or error.maybe_applied
            last = error
        # Exists, or nobody knows: what stands there decides.
        try:
            standing = store.get(key, max_bytes=max_bytes)
        except NotFound:
            continue
        except Unavailable as error:
            last = error
            continue
        return Claim(key=key, won=standing == body, body=standing)
    raise Unavailable(
        "no definite answer to a conditional write",
        key=key,
        url=store.url,
        tries=TRIES_MAX,
        maybe_applied=maybe_applied,
        last=last,
    )


def probe_store(store: Store, env: Env) -> None:
    """Refuse a store that does not keep what safety needs (format §2). Writes and deletes one small object.

    Raises :class:`UnsupportedStore` naming the missing promise; :class:`Denied` or :class:`Unavailable` from the store pass through.
    """
    if not store.capabilities.create_if_absent:
        raise UnsupportedStore(
            "the store does not promise create-if-absent",
            url=store.url,
            remedy="two aggregators could overwrite each other; use s3://, gs:// or a local directory (docs/providers.md says what else is possible)",
        )
    key = keys.probe(env.entropy.attempt_id())
    first, second = b"first " + key.encode(), b"second " + key.encode()
    if not claim_object(store, env, key, first).won:
        raise UnsupportedStore("a new object was not created", url=store.url, key=key)
    try:
        store.put(key, second)
    except AlreadyExists:
        pass
    else:
        raise UnsupportedStore(
            "the store ignores create-if-absent: a second create of one key succeeded",
            url=store.url,
            remedy="two aggregators could overwrite each other; use a store that honours If-None-Match (S3, GCS, MinIO, SeaweedFS, a local directory)",
        )
    if store.get(key) != first:
        raise UnsupportedStore("a refused create changed the object", url=store.url, key=key)
    if not any(info.key == key for info in store.list("probe/")):
        raise UnsupportedStore("an object just written is not listed", url=store.url, key=key)
    store.delete(key)
