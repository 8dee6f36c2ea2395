"""Listing in key order over directories, for stores whose names are a tree.

::

    walk(entries, "units/us/", start_after="units/us/t000000/000003")  # (key, what entries said about it), in key order
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from ps_diloco.store.names import is_key

About = TypeVar("About")
Entries = Callable[[str], Iterable[tuple[str, About]]]
"""directory ("" or ending in ``/``) -> (name, anything) of what is in it; the names of directories end in ``/``. Asked once for each directory."""


def walk(entries: Entries[About], prefix: str, start_after: str) -> Iterator[tuple[str, About]]:
    """All keys below ``prefix`` that are greater than ``start_after``. Reads only the directories that can hold one, each when it is reached."""
    return _below(entries, prefix[: prefix.rfind("/") + 1], prefix, start_after)


def _below(entries: Entries[About], directory: str, prefix: str, start_after: str) -> Iterator[tuple[str, About]]:
    # A directory sorts with its "/": "a-b" stands before what is in "a/".
    for name, about in sorted(entries(directory), key=lambda entry: entry[0]):
        key = directory + name
        if name.endswith("/"):
            wanted = key.startswith(prefix) or prefix.startswith(key)
            if wanted and (key > start_after or start_after.startswith(key)):
                yield from _below(entries, key, prefix, start_after)
        elif key.startswith(prefix) and key > start_after and is_key(key):
            yield key, about
