"""Text as bytes: a corpus, its held-out part, and each unit's own order of training windows.

B sequences in a batch, T time (context), N bytes of the text::

    corpus = load_corpus(DataSettings(source="texts/"), context=128)
    stream = Stream(corpus, run_seed=0, unit="a", context=128, batch_size=8)
    tokens_BT, targets_BT = stream.next_batch()

Every unit reads the whole training part, each in its own permutation (design: data). Only reading a source does I/O.
"""

from __future__ import annotations

import glob
import hashlib
import os
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ps_diloco.errors import ConfigError
from workers.settings import DataSettings

SEPARATOR = 0
"""Byte between two documents; does not occur in text."""
WHOLE_FILES_MIN = 50
"""Held out are whole files from this many files on, else blocks of files."""
BLOCK_BYTES = 4096
CURSOR_LIMIT = 2**53
"""Numbers of a cursor are below this, as any JSON reader keeps them exactly."""
SKIPPED_DIRECTORIES = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})
"""Of the standard library: what is not part of it, and tests, which some systems leave out."""


@dataclass(frozen=True, kw_only=True)
class Document:
    """One file. ``name`` is relative to its source, so that machines agree on it."""

    name: str
    body: bytes


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Disjoint training and held-out text, uint8. Immutable, safe to share between threads."""

    source: str
    train_N: Tensor
    held_out_N: Tensor

    def held_out_batches(self, batches: int, *, batch_size: int, context: int) -> Iterator[tuple[Tensor, Tensor]]:
        """At most ``batches`` fixed batches, spread evenly over the text: tokens and targets (B, T), int64; the last may be smaller."""
        standing = window_count(self.held_out_N, context)
        wanted = min(standing, batches * batch_size)
        windows = torch.arange(wanted) * standing // wanted
        for start in range(0, wanted, batch_size):
            yield take_windows(self.held_out_N, windows[start : start + batch_size], context)


class Stream:
    """A unit's endless sequence of training batches: one permutation of all windows per epoch, a function of (run seed, unit, epoch) alone.

    For one thread. A batch that meets the end of an epoch goes on in the next one.
    """

    def __init__(self, corpus: Corpus, *, run_seed: int, unit: str, context: int, batch_size: int) -> None:
        self._text_N = corpus.train_N
        self._run_seed, self._unit = run_seed, unit
        self._context, self._batch_size = context, batch_size
        self._windows = window_count(corpus.train_N, context)
        self._epoch, self._position = 0, 0
        self._order = self._permutation(0)

    @property
    def cursor(self) -> dict[str, int]:
        """Where the next batch starts, for JSON: ``epoch`` and ``position`` (windows of this epoch already given)."""
        return {"epoch": self._epoch, "position": self._position}

    def resume(self, cursor: object) -> None:
        """Continue after the batch that ``cursor`` was read behind. Raises :class:`ConfigError` if it is no cursor.

        On a text with fewer windows than the position the next epoch starts.
        """
        epoch, position = (cursor.get(name) if isinstance(cursor, Mapping) else None for name in ("epoch", "position"))
        if type(epoch) is not int or type(position) is not int or not (0 <= epoch < CURSOR_LIMIT and 0 <= position < CURSOR_LIMIT):
            raise ConfigError("a data cursor holds two whole numbers, epoch and position", cursor=repr(cursor)[:100])
        self._epoch, self._position = epoch, position
        self._order = self._permutation(epoch)

    def next_batch(self) -> tuple[Tensor, Tensor]:
        """tokens (B, T) and targets (B, T), int64, targets one byte ahead. No I/O."""
        parts, missing = [], self._batch_size
        while missing:
            if self._position >= self._windows:
                self._epoch, self._position = self._epoch + 1, 0
                self._order = self._permutation(self._epoch)
            part = self._order[self._position : self._position + missing]
            parts.append(part)
            self._position += len(part)
            missing -= len(part)
        return take_windows(self._text_N, torch.cat(parts), self._context)

    def _permutation(self, epoch: int) -> Tensor:
        digest = hashlib.sha256(f"{self._run_seed}/{self._unit}/{epoch}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8]) >> 1)
        return torch.randperm(self._windows, generator=generator)


def window_count(text_N: Tensor, context: int) -> int:
    """Windows of ``context`` tokens side by side, each with its next byte as last target."""
    return max(0, (len(text_N) - 1) // context)


def take_windows(text_N: Tensor, windows_B: Tensor, context: int) -> tuple[Tensor, Tensor]:
    """tokens and targets (B, T) int64 of the given window numbers."""
    bytes_BT = text_N[windows_B[:, None] * context + torch.arange(context + 1)].long()
    return bytes_BT[:, :-1], bytes_BT[:, 1:]


def load_corpus(settings: DataSettings, *, context: int) -> Corpus:
    """Read the source and split it. Raises :class:`ConfigError` naming the source if nothing there can be trained on. Does I/O."""
    documents = [document for document in _read_source(settings) if document.body]
    if not documents:
        raise ConfigError("the source of the training text holds only empty files", source=repr(settings.source))
    train, held_out = split(documents, settings.held_out)
    for part, text in (("training", train), ("held-out", held_out)):
        if len(text) <= context:
            raise ConfigError(
                "the training text is too small: each part needs more bytes than the model's context",
                source=repr(settings.source),
                part=part,
                bytes=len(text),
                context=context,
                remedy="give more text, or lower the context",
            )
    return Corpus(
        source=settings.source,
        train_N=torch.frombuffer(train, dtype=torch.uint8),
        held_out_N=torch.frombuffer(held_out, dtype=torch.uint8),
    )


def split(documents: Sequence[Document], share: float) -> tuple[bytearray, bytearray]:
    """(training bytes, held-out bytes), disjoint, with a separator between two documents.

    A hash of the name decides, so that units whose sources differ in a few files still agree on all others. Whole files where there are
    many and none is larger than the share; else blocks of :data:`BLOCK_BYTES`. The piece of the lowest hash is held out in any case.
    """
    total = sum(len(document.body) for document in documents)
    whole = len(documents) >= WHOLE_FILES_MIN and max(len(document.body) for document in documents) <= share * total
    pieces = [
        (index, _uniform_hash(f"{document.name}#{start}"), document.body[start : start + step])
        for index, document in enumerate(documents)
        for step in (len(document.body) if whole else BLOCK_BYTES,)
        for start in range(0, len(document.body), step)
    ]
    limit = max(share, min(score for _, score, _ in pieces))
    train, held_out = bytearray(), bytearray()
    last_index = {id(train): -1, id(held_out): -1}
    for index, score, body in pieces:
        part = held_out if score <= limit else train
        if part and last_index[id(part)] != index:
            part.append(SEPARATOR)
        last_index[id(part)] = index
        part += body
    return train, held_out


def _uniform_hash(text: str) -> float:
    """A number in [0, 1) that depends on nothing but ``text``."""
    return int.from_bytes(hashlib.sha256(text.encode(errors="surrogateescape")).digest()[:6]) / 2**48


def _read_source(settings: DataSettings) -> list[Document]:
    """All documents of a source in a fixed order."""
    if "://" in settings.source:
        return _read_url(settings)
    if settings.source == "stdlib":
        root = Path(sysconfig.get_path("stdlib"))
        paths = [path for path in root.rglob("*.py") if not SKIPPED_DIRECTORIES.intersection(path.relative_to(root).parts)]
    else:
        root, paths = _local_files(settings)
    documents: list[Document] = []
    size = 0
    for name, path in sorted((path.relative_to(root).as_posix(), path) for path in paths):
        try:
            body = path.read_bytes()
        except OSError as error:
            raise ConfigError("cannot read the training text", source=repr(settings.source), file=path, cause=error.strerror) from None
        size = _bounded(size + len(body), settings)
        documents.append(Document(name=name, body=body))
    return _some(documents, settings)


def _local_files(settings: DataSettings) -> tuple[Path, list[Path]]:
    """(directory that names are relative to, files) of a file, a directory or a glob."""
    path = Path(settings.source).expanduser()
    if path.is_dir():
        return path, [found for found in path.rglob("*") if found.suffix in settings.suffixes and found.is_file()]
    if path.exists():
        return path.parent, [path]
    found_paths = [Path(found) for found in glob.glob(str(path), recursive=True)]
    files = [found for found in found_paths if found.is_file()]
    root = os.path.commonpath([found.parent for found in files]) if files else "."
    return Path(root), files


def _read_url(settings: DataSettings) -> list[Document]:
    """Documents of an fsspec URL: one object, all with the suffixes below a prefix, or a glob."""
    from fsspec.core import url_to_fs

    try:
        filesystem, root = url_to_fs(settings.source)
        if glob.has_magic(root):
            paths = filesystem.glob(root)
        elif filesystem.isdir(root):
            paths = [path for path in filesystem.find(root) if path.endswith(settings.suffixes)]
        else:
            paths = [root]
        documents: list[Document] = []
        size = 0
        base = os.path.commonpath([os.path.dirname(path) for path in paths]) if paths else ""
        for path in sorted(path for path in paths if not filesystem.isdir(path)):
            body = bytes(filesystem.cat_file(path))
            size = _bounded(size + len(body), settings)
            documents.append(Document(name=os.path.relpath(path, base or None), body=body))
    except (OSError, ImportError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        cause = f"{type(error).__name__}({error})"
        raise ConfigError("cannot read the training text", source=repr(settings.source), cause=cause) from None
    return _some(documents, settings)


def _some(documents: list[Document], settings: DataSettings) -> list[Document]:
    if not documents:
        raise ConfigError(
            "the source of the training text has no files",
            source=repr(settings.source),
            suffixes=",".join(settings.suffixes),
            remedy="give a file, a directory with such files, a glob, an fsspec URL, or 'stdlib'",
        )
    return documents


def _bounded(size: int, settings: DataSettings) -> int:
    if size > settings.bytes_max:
        raise ConfigError(
            "the training text is larger than data.bytes_max",
            source=repr(settings.source),
            bytes_max=settings.bytes_max,
            remedy="choose a part of it, or raise the limit if memory allows",
        )
    return size
