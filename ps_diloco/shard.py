"""The shard container (format §5.9): a bounded, self-describing object of named, chunked, compressed vectors.

Writing::

    params = encode_section("params", "int4", x_F, decoded=q_F)     # q_F receives decode(encode(x_F))
    data = encode_shard([params], kind="contribution", run_id=run_id, of=str(contribution), fragment=3)

Reading bytes that nobody trusts::

    shard = ShardReader(data, kind="contribution", run_id=run_id, of=str(contribution), fragment=3,
                        expected={"params": (elements, PUSH_CODECS)})
    shard.visit("params", lambda start, values_P: ...)              # or shard.read("params")
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Annotated, Literal

import google_crc32c
import torch
from pydantic import Field, ValidationError

from ps_diloco.arrays import empty, in_order
from ps_diloco.codecs import CODECS, Codec, Each
from ps_diloco.errors import FormatError, IntegrityError, LimitExceeded, UnknownFormat
from ps_diloco.records import FORMAT, Count, Number6, Part, RunId, Text
from ps_diloco.records import no_duplicates as no_duplicates
from ps_diloco.zstd import LEVEL, compress, decompress

MAGIC = b"PSDSHRD0"
HEADER_BYTES_MAX = 1 << 20
HEADER_FIXED_MAX = 16 << 10
CHUNK = 1 << 22
SLACK = 64 << 10
FIXED = struct.Struct("<8sII")
FLOAT_CODECS = frozenset({"none", "bf16", "int8", "int4"})
EXACT = frozenset({"none"})
INTEGER = frozenset({"int64"})
Kind = Literal["contribution", "delta", "state"]


class SectionHeader(Part):
    name: Annotated[str, Field(max_length=40)]
    codec: Annotated[str, Field(max_length=40)]
    elements: Count
    chunks: tuple[tuple[Count, Count], ...]


class Header(Part):
    format: int
    kind: Kind
    run_id: RunId
    of: Text
    fragment: Number6
    slices: tuple[tuple[Count, Count, Count], ...] | None
    sections: Annotated[tuple[SectionHeader, ...], Field(max_length=8)]


@dataclass(frozen=True, kw_only=True)
class Section:
    """An encoded vector: one zstd frame per chunk."""

    name: str
    codec: str
    elements: int
    frames: tuple[bytes, ...]

    @property
    def size(self) -> int:
        return sum(len(frame) for frame in self.frames)


def encode_section(
    name: str,
    codec: str,
    values: torch.Tensor,
    *,
    decoded: torch.Tensor | None = None,
    each: Each | None = None,
    threads: int = 1,
    level: int = LEVEL,
) -> Section:
    """Encode a flat vector chunk by chunk; ``decoded``, if given, receives what a reader will get (error feedback needs it). ``level``: of zstd.

    ``each`` gets the same piece by piece while it is in the cache, and may change ``values`` at that place::

        section = encode_section("params", "int4", x_F, each=lambda start, q_P: x_F[start : start + len(q_P)].sub_(q_P))    # x_F is the residual now

    With more ``threads`` it is called by several at once, for pieces of different chunks. Raises :class:`NonFinite` if a value is NaN or infinite.
    Memory beyond the result is a chunk's raw bytes for each thread.
    """
    coder = CODECS[codec]

    def encode_chunk(start: int) -> bytes:
        def hand_over(first: int, piece_P: torch.Tensor) -> None:
            first += start
            if decoded is not None:
                decoded[first : first + piece_P.numel()].copy_(piece_P)
            if each is not None:
                each(first, piece_P)

        raw = coder.encode(values[start : start + CHUNK], None if decoded is None and each is None else hand_over)
        return compress(raw, level)

    frames = in_order(encode_chunk, range(0, values.numel(), CHUNK), threads=threads)
    return Section(name=name, codec=codec, elements=values.numel(), frames=tuple(frames))


def decode_section(section: Section, *, threads: int = 1) -> torch.Tensor:
    """What a reader will get from a section that this process encoded, as a new tensor."""
    values = empty(section.elements, CODECS[section.codec].dtype)
    visit_section(section, None, out=values, threads=threads)
    return values


def visit_section(section: Section, each: Each | None, *, out: torch.Tensor | None = None, threads: int = 1) -> None:
    """Decode a section that this process encoded, piece by piece, into ``out`` or into memory that is used again. ``each`` as in :func:`encode_section`."""
    _visit(section.codec, section.elements, section.frames.__getitem__, each, of=section.name, out=out, threads=threads)


def _visit(
    codec: str,
    elements: int,
    frame: Callable[[int], bytes],
    each: Each | None,
    *,
    of: str,
    out: torch.Tensor | None = None,
    threads: int = 1,
) -> None:
    """Decode chunks; ``frame`` gives the frame of a chunk by its number."""
    coder = CODECS[codec]

    def decode_chunk(index: int) -> None:
        start = index * CHUNK
        count = min(CHUNK, elements - start)
        raw = decompress(frame(index), coder.raw_bytes(count), of=of)
        for first, piece_P in coder.pieces(raw, count, None if out is None else out[start : start + count]):
            if each is not None:
                each(start + first, piece_P)

    in_order(decode_chunk, range(-(-elements // CHUNK)), threads=threads)


def encode_shard(sections: Sequence[Section], *, kind: Kind, run_id: str, of: str, fragment: int) -> bytes:
    """The bytes of a shard that holds ``sections`` in this order, whole fragment."""
    header = Header(
        format=FORMAT,
        kind=kind,
        run_id=run_id,
        of=of,
        fragment=fragment,
        slices=None,
        sections=tuple(
            SectionHeader(
                name=section.name,
                codec=section.codec,
                elements=section.elements,
                chunks=tuple((len(frame), google_crc32c.value(frame)) for frame in section.frames),
            )
            for section in sections
        ),
    )
    text = json.dumps(header.model_dump(mode="json"), sort_keys=True, separators=(",", ":")).encode()
    limit = header_bytes_max(sum(len(section.frames) for section in sections))
    if len(text) > limit:
        raise LimitExceeded("shard header would be larger than the format allows", size=len(text), limit=limit)
    return b"".join(
        [FIXED.pack(MAGIC, len(text), google_crc32c.value(text)), text, *(frame for section in sections for frame in section.frames)]
    )


def header_bytes_max(chunks: int) -> int:
    """Limit of a header that names this many chunks. The size of a header bounds what a hostile one costs: about 700 times its bytes, and 2 s a MiB."""
    return min(HEADER_BYTES_MAX, HEADER_FIXED_MAX + 64 * chunks)


def section_bytes_max(codec: Codec, elements: int) -> int:
    return codec.raw_bytes(elements) * 101 // 100 + SLACK


Expected = Mapping[str, tuple[int, frozenset[str]]]
"""Section name -> (elements, codecs allowed). A reader knows all of it from the layout."""


def shard_bytes_max(expected: Expected) -> int:
    """Largest size of a shard with these sections: what a reader fetches at most."""
    return (
        FIXED.size
        + HEADER_BYTES_MAX
        + sum(max(section_bytes_max(CODECS[name], elements) for name in codecs) for elements, codecs in expected.values())
    )


class ShardReader:
    """Checks a shard's framing on construction and its chunks while they are read. Holds only the object's own bytes.

    Raises :class:`FormatError` (or :class:`UnknownFormat`, :class:`LimitExceeded`, :class:`IntegrityError`, :class:`NonFinite`); never allocates by a
    number that was read from the object before it was compared with what the layout says.
    """

    def __init__(self, data: bytes, *, kind: Kind, run_id: str, of: str, fragment: int, expected: Expected) -> None:
        self._data = memoryview(data)
        if len(data) > shard_bytes_max(expected):
            raise LimitExceeded("shard is larger than its content can need", of=of, size=len(data), limit=shard_bytes_max(expected))
        limit = header_bytes_max(sum(-(-elements // CHUNK) for elements, _ in expected.values()))
        self._header = header = _parse_header(self._data, of, limit)
        stated = {"kind": header.kind, "run_id": header.run_id, "of": header.of, "fragment": header.fragment, "slices": header.slices}
        wanted = {"kind": kind, "run_id": run_id, "of": of, "fragment": fragment, "slices": None}
        for name, value in wanted.items():
            if stated[name] != value:
                raise FormatError(
                    "shard is not the one that was asked for", of=of, field=name, found=repr(stated[name])[:120], expected=repr(value)
                )
        if [section.name for section in header.sections] != list(expected):
            raise FormatError(
                "shard does not hold the expected sections", of=of, found=[s.name for s in header.sections], expected=list(expected)
            )
        self._places: dict[str, tuple[SectionHeader, list[int]]] = {}
        position = FIXED.size + struct.unpack_from("<I", data, 8)[0]
        for section in header.sections:
            elements, codecs = expected[section.name]
            if section.elements != elements:
                raise FormatError(
                    "section has another length than the layout says",
                    of=of,
                    section=section.name,
                    elements=section.elements,
                    expected=elements,
                )
            if section.codec not in codecs:
                raise FormatError(
                    "codec is not known or not allowed here", of=of, section=section.name, codec=section.codec, known=sorted(codecs)
                )
            if len(section.chunks) != -(-elements // CHUNK):
                raise FormatError("section has a wrong number of chunks", of=of, section=section.name, chunks=len(section.chunks))
            *positions, end = accumulate((size for size, _ in section.chunks), initial=position)
            self._places[section.name] = (section, positions)
            stored = end - position
            if stored > section_bytes_max(CODECS[section.codec], elements):
                raise LimitExceeded("section is larger than its content can need", of=of, section=section.name, size=stored)
            position = end
        if position != len(data):
            raise IntegrityError("stored sizes do not add up to the object", of=of, size=len(data), stated=position)

    def codec(self, section: str) -> str:
        return self._places[section][0].codec

    def chunks(self, section: str) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield (start, decoded values) per chunk, in order, each a new tensor."""
        header = self._places[section][0]
        codec = CODECS[header.codec]
        for index in range(len(header.chunks)):
            start = index * CHUNK
            count = min(CHUNK, header.elements - start)
            yield start, codec.decode(decompress(self._frame(section, index), codec.raw_bytes(count), of=self._header.of), count)

    def visit(self, section: str, each: Each | None, *, out: torch.Tensor | None = None, threads: int = 1) -> None:
        """Decode a section piece by piece, into ``out`` or into memory that is used again, so that a reader needs no array for it::

            shard.visit("params", lambda start, update_P: theta_F[start : start + len(update_P)].sub_(update_P))

        A piece was checked, what comes after it was not: whoever keeps something of it must be able to give that up when this raises. With more
        ``threads``, ``each`` is called by several at once, for pieces of different chunks.
        """
        header = self._places[section][0]
        _visit(header.codec, header.elements, lambda index: self._frame(section, index), each, of=self._header.of, out=out, threads=threads)

    def read(self, section: str, *, threads: int = 1) -> torch.Tensor:
        """All values of a section as one new tensor."""
        header = self._places[section][0]
        values = empty(header.elements, CODECS[header.codec].dtype)
        self.visit(section, None, out=values, threads=threads)
        return values

    def _frame(self, section: str, index: int) -> bytes:
        """The stored bytes of a chunk, checked against their checksum."""
        header, positions = self._places[section]
        size, crc = header.chunks[index]
        frame = bytes(self._data[positions[index] : positions[index] + size])
        if google_crc32c.value(frame) != crc:
            raise IntegrityError("chunk does not have the stated checksum", of=self._header.of, section=section, start=index * CHUNK)
        return frame


def _parse_header(data: memoryview, of: str, limit: int) -> Header:
    if len(data) < FIXED.size or bytes(data[:8]) != MAGIC:
        raise FormatError("object is not a shard", of=of, size=len(data), begins=bytes(data[:8]).hex())
    _, length, crc = FIXED.unpack_from(data)
    if length > limit:
        raise LimitExceeded("shard header is larger than its content can need", of=of, size=length, limit=limit)
    text = bytes(data[FIXED.size : FIXED.size + length])
    if len(text) != length or google_crc32c.value(text) != crc:
        raise IntegrityError("shard header is cut off or does not have the stated checksum", of=of, size=len(text), stated=length)
    try:
        values = json.loads(text, object_pairs_hook=no_duplicates)
        if not isinstance(values, dict) or values.get("format") != FORMAT:
            raise UnknownFormat(
                "shard has a format number that this version does not read", of=of, known=FORMAT, remedy="upgrade ps-diloco"
            )
        return Header.model_validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise FormatError(
            "shard header does not follow the format", of=of, field=".".join(map(str, first["loc"]))[:200], rule=first["msg"]
        ) from None
    except (ValueError, RecursionError) as error:
        raise FormatError("shard header is not JSON", of=of, cause=str(error)[:120]) from None
