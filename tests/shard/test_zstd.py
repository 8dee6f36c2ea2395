"""The zstd stage (format §5.9): frames written by hand after RFC 8878, and what is refused before anything is allocated."""

from __future__ import annotations

import tracemalloc

import pytest
from numcodecs.zstd import Zstd

from ps_diloco.errors import IntegrityError
from ps_diloco.zstd import compress, declared_size, decompress

MAGIC = "28b52ffd"
# descriptor 0x24: single segment, checksum, size in one byte; then one raw block; then the low half of XXH64
ABC = bytes.fromhex(MAGIC + "24 03" + "190000 616263" + "990977ad")


def test_a_frame_written_by_hand_is_read() -> None:
    assert bytes(decompress(ABC, 3, of="t")) == b"abc"


@pytest.mark.parametrize("size", [1, 2, 255, 256, 257, 65791, 65792, 100_000])
def test_a_frame_states_its_size_and_comes_back(size: int) -> None:
    raw = bytes(range(256)) * (size // 256 + 1)
    frame = compress(raw[:size])
    assert declared_size(frame) == size
    assert frame[4] & 0b100  # checksum
    assert bytes(decompress(frame, size, of="t")) == raw[:size]
    assert bytes(decompress(memoryview(frame), size, of="t")) == raw[:size]


def test_incompressible_data_grows_less_than_the_format_allows() -> None:
    raw = b"".join((i * 2654435761 % 2**32).to_bytes(4, "little") for i in range(1 << 16))
    assert len(compress(raw)) <= len(raw) * 1.01 + (64 << 10)


@pytest.mark.parametrize(
    ("descriptor", "rest", "size"),
    [
        ("24", "07", 7),  # one byte, single segment
        ("64", "0001", 256 + 256),  # two bytes, plus 256
        ("a4", "01000000", 1),  # four bytes
        ("e4", "0000000001000000", 2**32),  # eight bytes
        ("44", "50 0001", 256 + 256),  # with a window descriptor before the size
        ("84", "50 02000000", 2),
        ("c4", "50 0300000000000000", 3),
        ("04", "50 000000", None),  # no size
        ("20", "07", None),  # no checksum
        ("25", "07 01", None),  # dictionary
        ("26", "07 0100", None),
        ("2c", "07", None),  # reserved bit
    ],
)
def test_the_declared_size_is_read_as_rfc_8878_says(descriptor: str, rest: str, size: int | None) -> None:
    assert declared_size(bytes.fromhex(MAGIC + descriptor + rest + "0000")) == size


@pytest.mark.parametrize("length", range(10))
def test_a_header_that_is_cut_off_declares_nothing(length: int) -> None:
    assert declared_size(bytes.fromhex(MAGIC + "c4 50 0300000000000000")[:length]) is None


def test_other_bytes_than_a_frame_declare_nothing() -> None:
    assert declared_size(bytes(100)) is None
    assert declared_size(bytes.fromhex("502a4d18 04000000 61626364")) is None  # a skippable frame


@pytest.mark.parametrize("raw_size", [0, 2, 4, 259])
def test_a_frame_of_another_size_is_refused(raw_size: int) -> None:
    with pytest.raises(IntegrityError, match="does not declare"):
        decompress(ABC, raw_size, of="t")


def test_a_frame_without_checksum_is_refused() -> None:
    frame = bytes(Zstd(level=1, checksum=False).encode(b"abc" * 100))
    with pytest.raises(IntegrityError, match="checksum"):
        decompress(frame, 300, of="t")


def test_every_flipped_bit_and_every_cut_of_a_frame_is_refused() -> None:
    raw = b"the quick brown fox jumps over the lazy dog, the quick brown fox"
    frame = compress(raw)
    refused = 0
    for bit in range(8 * len(frame)):
        flipped = bytearray(frame)
        flipped[bit // 8] ^= 1 << bit % 8
        try:
            assert bytes(decompress(flipped, len(raw), of="t")) == raw  # e.g. the bit that RFC 8878 leaves unused
        except IntegrityError:
            refused += 1
    assert refused >= 8 * len(frame) - 8
    for length in range(len(frame)):
        with pytest.raises(IntegrityError):
            decompress(frame[:length], len(raw), of="t")
    with pytest.raises(IntegrityError):
        decompress(frame + b"\0", len(raw), of="t")
    with pytest.raises(IntegrityError):
        decompress(frame + frame, len(raw), of="t")


def test_a_bomb_is_refused_in_little_memory_whatever_it_declares() -> None:
    big = bytearray(compress(bytes(50_000_000)))
    assert len(big) < 10_000 and big[4] == 0x84 and declared_size(big) == 50_000_000
    small = bytearray(big)
    small[6:10] = (1000).to_bytes(4, "little")  # says 1,000 and inflates to 50 million
    tracemalloc.start()
    try:
        with pytest.raises(IntegrityError, match="does not declare"):
            decompress(big, 1000, of="t")
        with pytest.raises(IntegrityError, match="damaged"):
            decompress(small, 1000, of="t")
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
