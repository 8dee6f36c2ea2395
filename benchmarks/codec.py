"""Encoding and decoding of each codec, against reading the same float32 values once.

    python -m benchmarks.codec                                  # 25 M and 500 M parameters
    python -m benchmarks.codec --params 1000000 --codecs int4   # in seconds

Encoding is what a unit does with a cut (error feedback included: the decoded payload and the new residual), down to the bytes that go out and their hash.
Decoding is what a reader does with those bytes: hash, checksums, zstd, decode. Beside them, what one would write instead.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable, Sequence

import numcodecs
import numpy as np
import safetensors.torch
import torch

from benchmarks.material import pseudo_gradient
from benchmarks.measure import Cell, Report, Stages, counts, fresh_bytes, median_s, medians, parser, ratio_text, torch_threads
from ps_diloco.shard import CHUNK, FLOAT_CODECS, ShardReader, encode_section, encode_shard

STAGES = {
    "ps_diloco.codecs.NoCodec.encode": "codec: encode",
    "ps_diloco.codecs.Bf16.encode": "codec: encode",
    "ps_diloco.codecs.BlockInt.encode": "codec: encode",
    "ps_diloco.codecs.BlockInt._find_scales": "scale",
    "ps_diloco.codecs.BlockInt._quantise": "quantise, decode, residual",
    "ps_diloco.codecs._pack_nibbles": "pack",
    "ps_diloco.codecs._unpack_nibbles": "unpack",
    "ps_diloco.zstd.compress": "zstd",
    "ps_diloco.zstd.decompress": "zstd",
    "google_crc32c.value": "crc32c",
    "hashlib.sha256": "sha256",
}
SPLIT = ("int4", "int8")
"""The defaults up and down: their time is split."""
EXPECTED_RUN = "0" * 32


class Bench:
    """One codec over one vector, in memory that is allocated before."""

    def __init__(self, values_F: torch.Tensor, codec: str) -> None:
        self.codec = codec
        self.values_F = values_F
        self.decoded_F = torch.empty_like(values_F)
        self.residual_F = torch.empty_like(values_F)
        self.data = b""
        self.encode()

    def encode(self) -> None:
        """What a cut costs: payload, residual, object, hash."""
        self.residual_F.copy_(self.values_F)
        section = encode_section("params", self.codec, self.residual_F, each=self._keep_error)
        self.data = encode_shard([section], kind="delta", run_id=EXPECTED_RUN, of="benchmark", fragment=0)
        self.sha256 = hashlib.sha256(self.data).hexdigest()

    def _keep_error(self, start: int, decoded_P: torch.Tensor) -> None:
        self.residual_F[start : start + decoded_P.numel()].sub_(decoded_P)

    def decode(self) -> None:
        """What a reader does with the object; the values go to memory that is there."""
        assert hashlib.sha256(self.data).hexdigest() == self.sha256
        shard = ShardReader(
            self.data,
            kind="delta",
            run_id=EXPECTED_RUN,
            of="benchmark",
            fragment=0,
            expected={"params": (self.values_F.numel(), frozenset({self.codec}))},
        )
        shard.visit("params", None, out=self.decoded_F)


def other_ways(values_F: torch.Tensor) -> dict[str, tuple[Callable[[], bytes], Callable[[bytes], object]]]:
    """What one would write instead: name -> (to bytes, from bytes)."""
    blosc = numcodecs.Blosc(cname="zstd", clevel=1, shuffle=numcodecs.Blosc.BITSHUFFLE)

    def save(dtype: torch.dtype) -> bytes:
        buffer = io.BytesIO()
        torch.save(values_F.to(dtype), buffer)
        return buffer.getvalue()

    def load(data: bytes) -> torch.Tensor:
        loaded: torch.Tensor = torch.load(io.BytesIO(data), weights_only=True)
        return loaded.to(torch.float32)

    def blosc_encode(dtype: torch.dtype) -> bytes:
        converted = values_F.to(dtype).view(torch.int16 if dtype == torch.bfloat16 else torch.int32).numpy()
        frames = [blosc.encode(converted[start : start + CHUNK]) for start in range(0, len(converted), CHUNK)]
        return b"".join(len(frame).to_bytes(8, "little") + frame for frame in frames)

    def blosc_decode(dtype: torch.dtype) -> Callable[[bytes], object]:
        def decode(data: bytes) -> torch.Tensor:
            values, position, start = torch.empty_like(values_F), 0, 0
            view = memoryview(data)
            kind = np.int16 if dtype == torch.bfloat16 else np.int32
            while position < len(data):
                size = int.from_bytes(view[position : position + 8], "little")
                raw = np.frombuffer(blosc.decode(view[position + 8 : position + 8 + size]), kind)
                values[start : start + len(raw)] = torch.from_numpy(raw.copy()).view(dtype)
                position, start = position + 8 + size, start + len(raw)
            return values

        return decode

    return {
        "torch.save bfloat16": (lambda: save(torch.bfloat16), load),
        "numcodecs Blosc zstd 1, bfloat16": (lambda: blosc_encode(torch.bfloat16), blosc_decode(torch.bfloat16)),
        "numcodecs Blosc zstd 1, float32": (lambda: blosc_encode(torch.float32), blosc_decode(torch.float32)),
        "safetensors bfloat16": (
            lambda: safetensors.torch.save({"x": values_F.to(torch.bfloat16)}),
            lambda data: safetensors.torch.load(data)["x"].to(torch.float32),
        ),
        "safetensors float32": (lambda: safetensors.torch.save({"x": values_F}), lambda data: safetensors.torch.load(data)["x"]),
    }


def stage_rows(call: Callable[[], None], whole_s: float, read_s: float) -> list[tuple[Cell, ...]]:
    """Own time of each stage in one more run, in units of reading the values once."""
    with Stages(STAGES) as stages:
        call()
    measured = sum(stages.seconds.values())
    return [
        (stage, seconds, share, ratio_text(seconds / read_s))
        for stage, seconds, share in stages.rows(max(whole_s, measured), rest="copies, decode, everything else")
    ]


def size_text(elements: int) -> str:
    return f"{elements / 1e6:g} M"


def measure(report: Report, values_F: torch.Tensor, codecs: Sequence[str], repeats: int, *, split: bool) -> None:
    elements = values_F.numel()
    where = f"{size_text(elements)}, one thread"
    read_s = median_s(lambda: values_F.sum(), max(repeats, 5))
    rows: list[tuple[Cell, ...]] = []
    for codec in codecs:
        bench = Bench(values_F, codec)
        seconds = medians({"encode": bench.encode, "decode": bench.decode}, repeats, warm=0)
        for action, taken_s in seconds.items():
            report.figure(f"{action} {codec}, {where}", taken_s, "s", floor=read_s, floor_is="reading the float32 values once (sum)")
        rows.append(way_row(codec, seconds, len(bench.data), elements, read_s, fresh_bytes(bench.encode)))
        if split and codec in SPLIT:
            for action, call in (("encode", bench.encode), ("decode", bench.decode)):
                report.table(
                    f"Stages of {action} {codec}, {where}",
                    ("stage", "s", "share", "x reading once"),
                    stage_rows(call, seconds[action], read_s),
                )
        del bench
    if split:
        for name, (encode, decode) in other_ways(values_F).items():
            data = encode()
            seconds = medians({"encode": encode, "decode": lambda d=data, way=decode: way(d)}, max(1, repeats // 2), warm=0)  # type: ignore[misc]
            rows.append(way_row(name, seconds, len(data), elements, read_s, fresh_bytes(encode)))
            del data
    columns = (
        "way",
        "encode s",
        "decode s",
        "encode x read",
        "decode x read",
        "bits per value",
        "encode GB/s of float32",
        "encode maps MB",
    )
    report.table(f"Beside what one would write instead, {where}", columns, rows)


def way_row(name: str, seconds: dict[str, float], size: int, elements: int, read_s: float, fresh: int) -> tuple[Cell, ...]:
    encode_s, decode_s = seconds["encode"], seconds["decode"]
    return (
        name,
        encode_s,
        decode_s,
        ratio_text(encode_s / read_s),
        ratio_text(decode_s / read_s),
        8 * size / elements,
        4 * elements / encode_s / 1e9,
        fresh / 1e6,
    )


def main(argv: Sequence[str] | None = None) -> None:
    options = parser(__doc__)
    options.add_argument(
        "--params", type=counts, default=[25_000_000, 500_000_000], help="numbers of parameters; all codecs for the smallest"
    )
    options.add_argument("--codecs", default="int4,int8,bf16,none")
    options.add_argument("--repeats", type=int, default=3)
    options.add_argument("--size", default="0.8M", help="GPT that gives the pseudo-gradients")
    options.add_argument("--train-steps", type=int, default=40, help="its inner steps")
    chosen = options.parse_args(argv)
    codecs = chosen.codecs.split(",")
    assert set(codecs) <= FLOAT_CODECS, codecs
    report = Report.begin("codec", chosen, argv)
    for elements in chosen.params:
        values_F = pseudo_gradient(elements, size=chosen.size, steps=chosen.train_steps)
        smallest = elements == min(chosen.params)
        with torch_threads(1):
            measure(report, values_F, codecs if smallest else codecs[:1], chosen.repeats, split=smallest)
    report.note(
        "encode: payload, decoded payload, residual, object, hash; decode: hash, checksums, zstd, values; memory for the values is there before"
    )
    report.note("others: without error feedback, hash and checksums, and without a bound on what a hostile object may allocate")
    report.end()


if __name__ == "__main__":
    main()
