"""Every benchmark runs, at sizes of seconds, and says what its page needs. No time is asserted."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks import merge
from benchmarks.measure import Report, Stages, parser, with_unit
from benchmarks.page import PAGE, block, filled, standing_results

GPT = ["--size", "tiny", "--train-steps", "2"]
TINY = {
    "codec": ["--params", "20000", "--repeats", "1", "--size", "tiny", "--train-steps", "2"],
    "blocked": ["--sizes", "tiny", "--repeats", "1", "--pairs", "1", "--every", "4", "--steps", "4", "--fragments", "1"],
    "merge": ["--params", "20000", "--units", "2", "--memory-params", "20000", "--memory-units", "2", *GPT],
    "requests": ["--params", "20000", "--versions", "25,45", *GPT],
    "transfer": ["--size", "200000", "--repeats", "1"],
    "aggregators": ["--params", "40000", "--units", "2", "--fragments", "2", "--rounds", "1", *GPT],
}


def within_this_process(words: Sequence[str]) -> str:
    """Instead of a process of its own, which only the figures of memory need."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        merge.main(words)
    return printed.getvalue()


@pytest.mark.parametrize("name", TINY)
def test_a_benchmark_runs_and_says_what_it_found(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in [variable for variable in os.environ if variable.startswith("AWS_")]:
        monkeypatch.delenv(variable)
    written = tmp_path / "found.json"
    monkeypatch.setattr(merge, "child", within_this_process)
    importlib.import_module(f"benchmarks.{name}").main([*TINY[name], "--json", str(written), "--provisional"])
    found = json.loads(written.read_text())
    assert (
        found["benchmark"] == name
        and found["provisional"]
        and found["figures"]
        and found["command"].startswith(f"python -m benchmarks.{name} --")
    )
    assert {"cpu", "cores", "ram_gb", "torch", "isa", "date", "revision"} <= set(found["machine"])
    assert all(figure["value"] >= 0 for figure in found["figures"])
    assert all(len(row) == len(table["columns"]) for table in found["tables"] for row in table["rows"])
    assert str(tmp_path) not in block(found)


def test_the_simulation_of_quality_runs(capsys: pytest.CaptureFixture[str]) -> None:
    from benchmarks.quality import main

    tiny = ["model.width=16", "model.heads=2", "model.layers=1", "model.context=16", "train.eval_batches=1"]
    main(["--tokens", "3000", "--speeds", "0.1,0.2", *(word for setting in tiny for word in ("--program", setting))])
    assert "loss" in capsys.readouterr().out


def test_every_benchmark_is_on_the_page_with_its_last_result() -> None:
    page = PAGE.read_text()
    for name in TINY:
        assert f"<!-- figures {name} -->" in page and f"python -m benchmarks.{name}" in page
    assert filled(page, standing_results()) == page, "run python -m benchmarks.page"


def test_stages_count_own_time_only_and_put_every_function_back(tmp_path: Path) -> None:
    from ps_diloco import shard, zstd

    original = zstd.compress
    with Stages(
        {"ps_diloco.zstd.compress": "zstd", "ps_diloco.nowhere.nothing": "x", "ps_diloco.shard.encode_section": "encode: rest"}
    ) as stages:
        import torch

        shard.encode_section("params", "int8", torch.ones(1000))
    assert stages.calls == {"encode: zstd": 1, "encode: rest": 1} and stages.missing == ["ps_diloco.nowhere.nothing"]
    assert zstd.compress is original is shard.compress  # type: ignore[attr-defined]
    assert sum(seconds for _, seconds, _ in stages.rows(1.0)) == pytest.approx(1.0)


def test_a_figure_knows_its_ratio_and_numbers_get_their_units() -> None:
    report = Report.begin("codec", parser("x").parse_args([]), ["--json", "x", "--provisional", "--params", "7"])
    report.figure("a", 3.0, "s", floor=2.0)
    assert report.figures[0].ratio == 1.5 and report.command == "python -m benchmarks.codec --params 7"
    assert [with_unit(0.0123, "s"), with_unit(2.5e9, "B"), with_unit(3.0, "times")] == ["12.3 ms", "2.5 GB", "3 times"]
