"""Codecs of one chunk (format §5.9): sizes, bytes worked out by hand, bounds, exactness, and what is refused."""

from __future__ import annotations

import math
import struct

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ps_diloco.codecs import BLOCK, CODECS, SCALE_MIN
from ps_diloco.errors import FormatError, NonFinite

PROPERTY = settings(max_examples=150, deadline=None, derandomize=True)
FLOATS = ("none", "bf16", "int8", "int4")
LEVELS = {"int8": 127, "int4": 7}
SIZES = (0, 1, 2, 3, 255, 256, 257, 511, 512, 513, 1000)


def _vector(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32)


def _sizes(name: str, n: int) -> int:
    blocks = math.ceil(n / 256)
    return {"none": 4 * n, "bf16": 2 * n, "int64": 8 * n, "int8": 2 * blocks + n, "int4": 2 * blocks + math.ceil(n / 2)}[name]


def _scales(raw: bytes, n: int) -> np.ndarray:
    """Scales of an int8 or int4 encoding, float64, one for each element; read without the code under test."""
    halves = np.frombuffer(raw[: 2 * math.ceil(n / 256)], dtype="<u2").astype(np.uint32) << 16
    return np.repeat(halves.view(np.float32).astype(np.float64), 256)[:n]


@st.composite
def vectors(draw: st.DrawFn) -> torch.Tensor:
    """Lengths around the block size; magnitudes from tiny to huge, some elements zero, some exact halves of a step."""
    n = draw(st.sampled_from(SIZES[1:]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    values = torch.randn(n, generator=generator) * 2.0 ** draw(st.integers(-120, 100))
    if draw(st.booleans()):
        values[torch.rand(n, generator=generator) < 0.5] = 0.0
    if draw(st.booleans()):
        top = draw(st.sampled_from([7.0, 127.0, 12.0, 1.0]))
        values = (torch.randint(-254, 255, (n,), generator=generator) / 2.0).clamp_(-top, top) * draw(
            st.sampled_from([1.0, 2.0**-30, 0.75])
        )
    return values


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("name", CODECS)
def test_an_encoding_has_exactly_the_size_that_the_format_states(name: str, n: int) -> None:
    values = torch.arange(n, dtype=CODECS[name].dtype)
    raw = CODECS[name].encode(values)
    assert len(raw) == CODECS[name].raw_bytes(n) == _sizes(name, n)
    back = CODECS[name].decode(raw, n)
    assert back.shape == (n,) and back.dtype == CODECS[name].dtype


# bytes by hand


def test_int8_bytes_are_those_of_the_format() -> None:
    raw = CODECS["int8"].encode(_vector(127.0, -127.0, 1.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5))
    # scale 127 / 127 = 1.0, bfloat16 0x3f80; halves to even: 0, 2, 2, 0, -2, -2
    assert raw == bytes.fromhex("803f" "7f 81 01 00 02 02 00 fe fe")  # fmt: skip
    assert CODECS["int8"].decode(raw, 9).tolist() == [127.0, -127.0, 1.0, 0.0, 2.0, 2.0, 0.0, -2.0, -2.0]


def test_int4_bytes_are_those_of_the_format_with_an_odd_length() -> None:
    raw = CODECS["int4"].encode(_vector(7.0, -7.0, 0.5, 1.5, 2.5))
    # scale 1.0; q = 7 -7 0 2 2, plus 8 = 15 1 8 10 10, the even element in the low nibble, the last nibble filled with 8
    assert raw == bytes.fromhex("803f" "1f a8 8a")  # fmt: skip
    assert CODECS["int4"].decode(raw, 5).tolist() == [7.0, -7.0, 0.0, 2.0, 2.0]


def test_int4_bytes_with_an_even_length_have_no_filler() -> None:
    assert CODECS["int4"].encode(_vector(-3.5, 3.5, 0.0, -1.0)) == bytes.fromhex("003f f1 68")  # scale 0.5; q = -7 7 0 -2


def test_scales_of_all_blocks_stand_before_the_values() -> None:
    values = torch.zeros(258)
    values[0], values[256], values[257] = 7.0, 14.0, -2.0
    raw = CODECS["int4"].encode(values)
    assert raw[:4] == bytes.fromhex("803f 0040")  # 1.0, 2.0
    assert raw[4:] == bytes.fromhex("8f" + "88" * 127 + "7f")  # q = 7 0 ..., then 7 -1


@pytest.mark.parametrize(("name", "top"), LEVELS.items())
@pytest.mark.parametrize(
    ("scale", "stored"),
    [
        (1.0, 0x3F80),
        (1.0 + 2**-8, 0x3F81),  # halfway: nearest even would give 0x3f80
        (1.0 + 2**-9, 0x3F81),  # nearest would give 0x3f80
        (1.0 + 2**-7, 0x3F81),
        (2.0 - 2**-8, 0x4000),  # the carry goes into the exponent
    ],
)
def test_a_scale_is_rounded_up_to_bfloat16(name: str, top: int, scale: float, stored: int) -> None:
    raw = CODECS[name].encode(_vector(top * scale))
    assert struct.unpack("<H", raw[:2]) == (stored,)


@pytest.mark.parametrize(("name", "top"), LEVELS.items())
def test_a_scale_below_two_to_the_minus_100_is_zero_and_so_are_its_values(name: str, top: int) -> None:
    below, at = _vector(top * 2.0**-101, -(2.0**-101)), _vector(top * 2.0**-100, 0.0)
    assert CODECS[name].encode(below)[:2] == b"\0\0"
    assert CODECS[name].decode(CODECS[name].encode(below), 2).tolist() == [0.0, 0.0]
    assert CODECS[name].encode(at)[:2] == bytes.fromhex("800d")  # exponent 27, 2^-100
    assert CODECS[name].decode(CODECS[name].encode(at), 2).tolist() == [top * SCALE_MIN, 0.0]


@pytest.mark.parametrize("name", ["int8", "int4"])
@pytest.mark.parametrize("tiny", [0.0, 1e-45, 1e-38, -1e-33])
def test_zeros_and_denormals_become_zeros(name: str, tiny: float) -> None:
    values = torch.full((300,), tiny)
    assert not CODECS[name].decode(CODECS[name].encode(values), 300).any()


def test_bf16_is_rounded_to_nearest_even() -> None:
    raw = CODECS["bf16"].encode(_vector(1.0 + 2**-8, 1.0 + 3 * 2**-8, 1.0 + 2**-8 + 2**-20, -2.0))
    assert struct.unpack("<4H", raw) == (0x3F80, 0x3F82, 0x3F81, 0xC000)


def test_none_and_int64_store_the_bytes_as_they_are() -> None:
    assert CODECS["none"].encode(_vector(1.5, -0.0, 1e-45)) == struct.pack("<3f", 1.5, -0.0, 1e-45)
    numbers = [0, -1, 2**63 - 1, -(2**63)]
    raw = CODECS["int64"].encode(torch.tensor(numbers))
    assert raw == struct.pack("<4q", *numbers)
    assert CODECS["int64"].decode(raw, 4).tolist() == numbers


# properties


@pytest.mark.parametrize("name", ["int8", "int4"])
@given(values=vectors())
@PROPERTY
def test_an_error_is_at_most_half_a_scale_and_a_product_exact(name: str, values: torch.Tensor) -> None:
    n, top = values.numel(), LEVELS[name]
    raw = CODECS[name].encode(values)
    decoded = CODECS[name].decode(raw, n).numpy().astype(np.float64)
    scale, exact = _scales(raw, n), values.numpy().astype(np.float64)
    error = np.abs(exact - decoded)
    assert (error[scale > 0] <= (scale / 2)[scale > 0]).all()
    assert (np.abs(exact)[scale == 0] < top * SCALE_MIN).all() and not decoded[scale == 0].any()
    q = np.rint(decoded / np.where(scale > 0, scale, 1.0))
    assert (np.abs(q) <= top).all()
    assert (q * scale == decoded).all()  # in float64, where both factors and the product fit: so float32 rounded nothing


@given(values=vectors())
@PROPERTY
def test_a_scale_is_the_smallest_bfloat16_that_is_large_enough(values: torch.Tensor) -> None:
    n = values.numel()
    scale = _scales(CODECS["int4"].encode(values), n)[::BLOCK]
    peaks = [float(block.abs().max()) for block in values.split(BLOCK)]
    wanted = np.array([np.float32(peak) / np.float32(7) for peak in peaks], dtype=np.float32)
    bits = wanted.view(np.uint32).astype(np.uint64)
    up = (((bits + 0xFFFF) >> 16) << 16).astype(np.uint32).view(np.float32).astype(np.float64)
    assert (scale == np.where(up < SCALE_MIN, 0.0, up)).all()


@pytest.mark.parametrize("name", ["none", "bf16", "int4"])
@given(values=vectors())
@PROPERTY
def test_what_was_decoded_is_encoded_without_a_further_loss(name: str, values: torch.Tensor) -> None:
    once = CODECS[name].decode(CODECS[name].encode(values), values.numel())
    twice = CODECS[name].decode(CODECS[name].encode(once), values.numel())
    assert torch.equal(once, twice)


@given(values=vectors())
@PROPERTY
def test_bf16_is_torchs_bfloat16_and_none_is_exact(values: torch.Tensor) -> None:
    assert torch.equal(CODECS["bf16"].decode(CODECS["bf16"].encode(values), values.numel()), values.bfloat16().float())
    assert torch.equal(CODECS["none"].decode(CODECS["none"].encode(values), values.numel()), values)


@pytest.mark.parametrize("name", FLOATS)
def test_encoding_leaves_its_input_and_decoding_shares_nothing_with_the_bytes(name: str) -> None:
    values = torch.linspace(-3.0, 3.0, 301)
    before = values.clone()
    raw = bytearray(CODECS[name].encode(values))
    decoded = CODECS[name].decode(raw, 301)
    kept = decoded.clone()
    raw[:] = bytes(len(raw))
    decoded_again = decoded.clone()
    decoded.add_(1.0)  # writable
    assert torch.equal(values, before) and torch.equal(decoded_again, kept)


# what is refused


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 255, 256, 299])
@pytest.mark.parametrize("name", FLOATS)
def test_an_encoder_refuses_what_is_not_finite_and_says_where(name: str, place: int, bad: float) -> None:
    values = torch.ones(300)
    values[place] = bad
    with pytest.raises(NonFinite) as caught:
        CODECS[name].encode(values)
    assert caught.value.facts["element"] == place


@pytest.mark.parametrize("name", FLOATS)
def test_opposite_infinities_are_refused_too(name: str) -> None:
    with pytest.raises(NonFinite):
        CODECS[name].encode(_vector(math.inf, -math.inf, 1.0))


@pytest.mark.parametrize("name", FLOATS)
def test_the_largest_finite_values_are_encoded_readably_or_refused(name: str) -> None:
    """Rounding up must not turn the largest float32 into bytes that no reader takes."""
    for value in (torch.finfo(torch.float32).max, 3.4e38, 3.38e38, 3.3e38):
        try:
            raw = CODECS[name].encode(_vector(value, -value))
        except NonFinite:
            assert name != "none" and value > 3.3e38
        else:
            assert torch.isfinite(CODECS[name].decode(raw, 2)).all()


@pytest.mark.parametrize("stored", [math.nan, math.inf, -math.inf])
def test_a_decoder_refuses_plain_values_that_are_not_finite(stored: float) -> None:
    with pytest.raises(NonFinite):
        CODECS["none"].decode(struct.pack("<2f", 1.0, stored), 2)
    with pytest.raises(NonFinite):
        CODECS["bf16"].decode(bytes(_vector(1.0, stored).bfloat16().view(torch.uint8).numpy()), 2)


@pytest.mark.parametrize("payload", ["int8 0000", "int4 88"])
@pytest.mark.parametrize(
    ("scale", "kind"),
    [
        (0x7F80, NonFinite),  # infinity
        (0xFF80, NonFinite),
        (0x7FC0, NonFinite),  # NaN
        (0x7F7F, NonFinite),  # finite, but 7 times it is not
        (0xBF80, FormatError),  # -1.0
        (0x8001, FormatError),  # the smallest negative number
    ],
)
def test_a_decoder_refuses_scales_that_no_encoder_writes(payload: str, scale: int, kind: type[FormatError]) -> None:
    name, text = payload.split()
    with pytest.raises(FormatError) as caught:
        CODECS[name].decode(struct.pack("<H", scale) + bytes.fromhex(text), 2)
    assert type(caught.value) is kind


def test_a_decoder_refuses_values_below_the_range() -> None:
    with pytest.raises(FormatError, match="out of range"):
        CODECS["int8"].decode(bytes.fromhex("803f 00 80"), 2)
    for packed in ("80", "08", "00"):  # nibble 0 stands for -8
        with pytest.raises(FormatError, match="out of range"):
            CODECS["int4"].decode(bytes.fromhex("803f" + packed), 2)


@pytest.mark.parametrize("nibble", [n for n in range(16) if n != 8])
def test_a_decoder_refuses_a_filler_that_is_not_zero(nibble: int) -> None:
    with pytest.raises(FormatError, match="filler"):
        CODECS["int4"].decode(bytes.fromhex("803f") + bytes([nibble << 4 | 9]), 1)
    assert CODECS["int4"].decode(bytes.fromhex("803f 89"), 1).tolist() == [1.0]
