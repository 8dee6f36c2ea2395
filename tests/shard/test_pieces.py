"""Working in pieces changes no bit: codecs against the reference, sections and outer steps against their whole-array forms, on one thread and on several."""

from __future__ import annotations

import math
import threading

import pytest
import torch

import ps_diloco.shard
from ps_diloco.arrays import PIECE, check_finite, copy_of, empty, in_order, pieces, total, zeros
from ps_diloco.codecs import CODECS, GROUP
from ps_diloco.config import OuterSettings
from ps_diloco.errors import FormatError, NonFinite
from ps_diloco.hashing import tree_hash
from ps_diloco.layout import LayoutEntry
from ps_diloco.merge import SumSquares, sum_squares
from ps_diloco.outer import OuterState, outer_step, publish_outer_step
from ps_diloco.shard import FLOAT_CODECS, ShardReader, decode_section, encode_section, encode_shard, visit_section
from ps_diloco.zstd import compress
from tests.shard import reference_codecs

FLOATS = sorted(FLOAT_CODECS)
BORDERS = (PIECE, 2 * PIECE, GROUP * PIECE, 2 * GROUP * PIECE)
SIZES = sorted({0, 1, 2, 3, 255, 256, 257, 511, 513, 70_001} | {at + by for at in BORDERS for by in (-257, -256, -1, 0, 1, 255, 256, 257)})


def _normal(n: int) -> torch.Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(n))


def _bits(values: torch.Tensor) -> torch.Tensor:
    """So that -0.0 is not 0.0."""
    return values.view(torch.int32) if values.dtype == torch.float32 else values


def _extremes(n: int) -> torch.Tensor:
    """Blocks of zeros of both signs, denormals, numbers around the smallest scale and near the largest that every codec takes, and halves of a step."""
    values = _normal(n)
    exponents = torch.tensor([-149, -140, -126, -101, -100, -99, -97, -94, -93, -1, 0, 1, 60, 119, 120])
    for block, part in enumerate(values.split(256)):
        kind = block % (len(exponents) + 3)
        if kind < len(exponents):
            part.clamp_(-3.9, 3.9).mul_(2.0 ** float(exponents[kind]))
        elif kind == len(exponents):
            part.zero_()[::2].neg_()
        elif kind == len(exponents) + 1:
            part.mul_(2.0).round_().div_(2.0)[0] = 7.0
        else:
            part[: len(part) // 2] = 0.0
            part[-1:] = 3.38e38
    return values


def _entries(*sizes: int) -> list[LayoutEntry]:
    entries, offset = [], 0
    for index, size in enumerate(sizes):
        entries.append(
            LayoutEntry(
                name=f"w{index}", shape=(size,), dtype="float32", role="parameter", fragment=0, offset=offset, aliases=(), embedding=False
            )
        )
        offset += size
    return entries


# codecs


@pytest.mark.parametrize(
    "make", [_normal, _extremes, lambda n: torch.zeros(n), lambda n: -torch.zeros(n), lambda n: torch.full((n,), 1e-45)]
)
@pytest.mark.parametrize("name", FLOATS)
def test_a_codec_has_the_bits_of_the_reference_at_every_border(name: str, make: object) -> None:
    for n in SIZES:
        values = make(n)  # type: ignore[operator]
        handed = torch.full((n,), torch.nan)
        raw = bytes(CODECS[name].encode(values.clone(), lambda start, piece, to=handed: to[start : start + len(piece)].copy_(piece)))
        assert raw == reference_codecs.encode(name, values)
        wanted = _bits(reference_codecs.decode(name, raw, n))
        assert torch.equal(_bits(handed), wanted)
        assert torch.equal(_bits(CODECS[name].decode(raw, n)), wanted)
        seen = [(start, piece.clone()) for start, piece in CODECS[name].pieces(raw, n)]
        assert torch.equal(_bits(torch.cat([torch.empty(0), *(piece for _, piece in seen)])), wanted)
        assert [start for start, _ in seen] == [sum(len(piece) for _, piece in seen[:index]) for index in range(len(seen))]
        assert all(len(piece) <= PIECE for _, piece in seen)


def test_integers_have_the_bits_of_the_reference() -> None:
    for n in SIZES:
        values = torch.randint(-(2**62), 2**62, (n,), generator=torch.Generator().manual_seed(n))
        raw = CODECS["int64"].encode(values)
        assert raw == reference_codecs.encode("int64", values)
        assert torch.equal(CODECS["int64"].decode(raw, n), values)


@pytest.mark.parametrize("name", FLOATS)
def test_a_piece_may_be_changed_and_so_may_the_values_it_was_made_of(name: str) -> None:
    values = _normal(3 * PIECE + 77)
    wanted = values - CODECS[name].decode(CODECS[name].encode(values), values.numel())

    def subtract(start: int, piece: torch.Tensor) -> None:
        values[start : start + len(piece)].sub_(piece)
        piece.fill_(torch.nan)

    CODECS[name].encode(values, subtract)
    assert torch.equal(_bits(values), _bits(wanted))


@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize("place", [0, PIECE, GROUP * PIECE + 1, 5 * PIECE + 299])
def test_what_is_not_finite_is_found_in_any_piece(name: str, place: int) -> None:
    values = torch.ones(5 * PIECE + 300)
    for bad in (math.nan, math.inf, -math.inf):
        values[place] = bad
        with pytest.raises(NonFinite):
            CODECS[name].encode(values)
    values[place] = torch.finfo(torch.float32).max
    if name != "none":
        with pytest.raises(NonFinite):
            CODECS[name].encode(values)


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_a_decoder_refuses_a_value_out_of_range_in_any_piece(name: str) -> None:
    n = 5 * PIECE + 300
    raw = bytearray(CODECS[name].encode(torch.ones(n)))
    raw[-1] = 0x80 if name == "int8" else 0x08
    with pytest.raises(FormatError, match="out of range"):
        CODECS[name].decode(raw, n)


# sections


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("name", FLOATS)
def test_a_section_has_the_same_bytes_and_values_on_any_number_of_threads(name: str, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ps_diloco.shard, "CHUNK", 2 * PIECE + 512)
    values = _extremes(9 * PIECE + 3)
    parts = values.split(2 * PIECE + 512)
    raws = [reference_codecs.encode(name, part) for part in parts]
    wanted = torch.cat([reference_codecs.decode(name, raw, len(part)) for raw, part in zip(raws, parts, strict=True)])
    decoded, handed, visited = (torch.full_like(values, torch.nan) for _ in range(3))

    def into(target: torch.Tensor):  # type: ignore[no-untyped-def]
        return lambda start, piece: target[start : start + len(piece)].copy_(piece)

    section = encode_section("params", name, values, decoded=decoded, each=into(handed), threads=threads)
    assert section.frames == tuple(map(compress, raws))
    data = encode_shard([section], kind="delta", run_id="0" * 32, of="x", fragment=0)
    reader = ShardReader(data, kind="delta", run_id="0" * 32, of="x", fragment=0, expected={"params": (len(values), FLOAT_CODECS)})
    reader.visit("params", into(visited), threads=threads)
    found = [decoded, handed, visited, decode_section(section, threads=threads), reader.read("params", threads=threads)]
    assert all(torch.equal(_bits(each), _bits(wanted)) for each in found)
    visit_section(section, into(visited.fill_(torch.nan)), threads=threads)
    assert torch.equal(_bits(visited), _bits(wanted))


@pytest.mark.parametrize("threads", [1, 3])
def test_a_visit_of_a_damaged_section_ends_in_an_error(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ps_diloco.shard, "CHUNK", 512)
    data = bytearray(encode_shard([encode_section("params", "int4", _normal(5000))], kind="delta", run_id="0" * 32, of="x", fragment=0))
    data[-700] ^= 1
    reader = ShardReader(bytes(data), kind="delta", run_id="0" * 32, of="x", fragment=0, expected={"params": (5000, FLOAT_CODECS)})
    with pytest.raises(FormatError, match="checksum"):
        reader.visit("params", lambda start, piece: None, threads=threads)


# sums of squares


def test_sums_of_squares_do_not_depend_on_the_order_of_the_pieces() -> None:
    sizes = (1, 0, 3 * PIECE + 5, 300, 0, 70_000, 1)
    values, entries = _normal(sum(sizes)), _entries(*sizes)
    forward, backward = SumSquares(entries), SumSquares(entries)
    cut = list(pieces(values))
    for start, piece in cut:
        forward.add(start, piece)
    for start, piece in reversed(cut):
        backward.add(start, piece)
    assert forward.totals() == backward.totals()
    exact = [math.fsum(part.double().square().tolist()) for part in values.split(sizes)]
    for found in (forward.totals(), sum_squares(values, entries)):
        assert all(math.isclose(a, b, rel_tol=2**-39) for a, b in zip(found, exact, strict=True))


# the outer step


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("codec", FLOATS)
def test_a_published_outer_step_has_the_bits_of_the_formula(codec: str, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ps_diloco.shard, "CHUNK", PIECE + 512)
    monkeypatch.setattr("ps_diloco.outer.CHUNK", PIECE + 512)
    n, outer = 3 * PIECE + 41, OuterSettings(lr=0.7, momentum=0.9)
    entries = _entries(1000, n - 1000)
    params, other = _normal(n), _normal(n)
    state, expected = OuterState.zeros(n), OuterState.zeros(n)
    for step in range(3):
        gradient = _normal(n + step)[:n]
        sections = []

        def quantise(x_F: torch.Tensor, to: list = sections) -> torch.Tensor:  # type: ignore[type-arg]
            update_F = torch.empty_like(x_F)
            to.append(encode_section("params", codec, x_F, decoded=update_F))
            return update_F

        update = outer_step(other, expected, gradient.clone(), outer, quantise)
        published = publish_outer_step(params, state, gradient, outer, codec, entries, threads=threads)
        assert published.section == sections[0]
        for found, wanted in ((params, other), (state.momentum, expected.momentum), (state.error, expected.error)):
            assert torch.equal(_bits(found), _bits(wanted))
        for found, wanted in ((published.gradient_squares, gradient), (published.update_squares, update)):
            assert found == pytest.approx(sum_squares(wanted, entries), rel=1e-12)


def test_an_outer_step_that_is_not_finite_is_refused() -> None:
    params, state = torch.full((10,), -3e38), OuterState.zeros(10)
    with pytest.raises(NonFinite):
        publish_outer_step(params, state, torch.full((10,), 3e38), OuterSettings(lr=1.0, momentum=0.0), "none", _entries(10))
    with pytest.raises(NonFinite):
        publish_outer_step(params, state, torch.full((10,), 3e38), OuterSettings(lr=10.0, momentum=0.0), "int8", _entries(10))


# arrays


@pytest.mark.parametrize("n", [0, 1, 17, 1 << 21])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bfloat16])
def test_new_arrays_are_aligned_and_stay_when_their_maker_is_gone(n: int, dtype: torch.dtype) -> None:
    arrays = [empty(n, dtype).fill_(1) for _ in range(3)]
    assert all(array.shape == (n,) and array.dtype == dtype and array.data_ptr() % 64 == 0 and (array == 1).all() for array in arrays)
    cleared = zeros(n, dtype)
    assert not cleared.any() and torch.equal(copy_of(arrays[0]), arrays[0])
    assert not n or copy_of(cleared).data_ptr() != cleared.data_ptr()


def test_pieces_cover_each_element_once() -> None:
    for n in SIZES:
        seen = list(pieces(torch.arange(n)))
        assert torch.equal(torch.cat([torch.empty(0, dtype=torch.int64), *(piece for _, piece in seen)]), torch.arange(n))
        assert all(int(piece[0]) == start and len(piece) <= PIECE for start, piece in seen)


def test_a_total_is_a_float64_sum() -> None:
    values = _normal(2 * PIECE + 5)
    assert total(values) == pytest.approx(math.fsum(values.tolist()), abs=1e-9)
    assert total(torch.empty(0)) == 0.0


@pytest.mark.parametrize("place", [0, PIECE - 1, PIECE, 2 * PIECE + 4])
def test_a_check_names_the_first_element_that_is_not_finite(place: int) -> None:
    values = torch.ones(2 * PIECE + 6)
    check_finite(values)
    values[place] = values[-1] = torch.inf
    with pytest.raises(NonFinite) as caught:
        check_finite(values)
    assert (caught.value.facts["element"], caught.value.facts["count"]) == (place, 2)


@pytest.mark.parametrize("threads", [0, 1, 2, 100])
def test_results_are_in_order_and_the_first_error_is_raised(threads: int) -> None:
    assert in_order(lambda x: x * x, range(50), threads=threads) == [x * x for x in range(50)]
    assert in_order(lambda x: x, [], threads=threads) == []

    def fails(x: int) -> None:
        if x in (3, 7):
            raise ValueError(x)

    with pytest.raises(ValueError, match="3"):
        in_order(fails, range(10), threads=threads)


def test_one_thread_is_the_callers_own() -> None:
    assert set(in_order(lambda _: threading.get_ident(), range(5))) == {threading.get_ident()}
    assert threading.get_ident() not in in_order(lambda _: threading.get_ident(), range(5), threads=2)


@pytest.mark.parametrize("n", [0, 5, (1 << 22) + 3])
def test_a_tree_hash_is_the_same_on_any_number_of_threads(n: int) -> None:
    values = _normal(n)
    assert tree_hash(values, threads=2) == tree_hash(values)
