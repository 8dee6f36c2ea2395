"""The commands of the README, in the order in which a user types them."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import safetensors.torch
import torch

from tests.cli.command import TINY, Processes, run

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("the quick brown fox jumps over the lazy dog. " * 2000)
    return path


@pytest.fixture
def processes() -> Iterator[Processes]:
    started = Processes()
    yield started
    started.end()


def create(place: Path, text: Path, target: int) -> str:
    made = run("init", str(place), *TINY, "--set", f'program.data.source="{text}"', "--set", f"target_tokens={target}")
    assert made.returncode == 0, made.stderr
    assert "created run" in made.stdout and f"ps-diloco unit {place}" in made.stdout
    return str(place)


def test_a_run_is_created_trained_merged_watched_and_exported(processes: Processes, text: Path, tmp_path: Path) -> None:
    url = create(tmp_path / "run", text, 20_000)
    units = [
        processes.start("unit", url, "--name", name, "--step-delay", "0.02", "--poll", "0.1", "--heartbeat", "0.5") for name in ("a", "b")
    ]
    deadline = time.monotonic() + 90
    while not all(Path(url, "units", name, "incarnations", "000000.json").exists() for name in ("a", "b")):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    aggregator = processes.start("aggregate", url, "--poll", "0.05")
    for unit in units:
        out, _ = unit.communicate(timeout=100)
        assert unit.returncode == 0, out
        assert "the run has reached its target" in out
    out, _ = aggregator.communicate(timeout=60)
    assert aggregator.returncode == 0, out
    assert "the run has ended at version" in out and " requests" in out

    status = json.loads(run("status", url, "--json").stdout)
    assert status["final"] and status["tokens"] >= status["target_tokens"] == 20_000
    assert sorted(status["units"]) == ["a", "b"]
    assert all(row["state"] == "ended: run ended" and row["merged"] > 0 and row["refused"] == 0 for row in status["units"].values())
    assert "version 0:" in run("status", url).stdout

    versions = [json.loads(line) for line in run("versions", url, "--json", "--last", "1000").stdout.splitlines()]
    assert [version["version"] for version in versions] == list(range(status["version"], -1, -1))
    assert sum(version["merged"] for version in versions) == sum(row["merged"] for row in status["units"].values())
    assert "final" in run("versions", url).stdout
    assert all((version["bytes_pushed"] > 0) == (version["bytes_published"] > 0) == bool(version["steps"]) for version in versions)
    opened = subprocess.run([sys.executable, ROOT / "examples" / "open_weights.py", url], capture_output=True, text=True, check=True)
    assert len(opened.stdout.splitlines()) == len(json.loads(Path(url, "run.json").read_text())["layout"]["entries"])

    for name in ("model.safetensors", "model.pt"):
        file = tmp_path / name
        exported = run("export", url, str(file))
        assert exported.returncode == 0, exported.stderr
        weights = safetensors.torch.load_file(file) if file.suffix == ".safetensors" else torch.load(file, weights_only=True)
        assert all(tensor.isfinite().all() for tensor in weights.values())
        assert run("export", url, str(file)).returncode == 2
    first = run("export", url, str(tmp_path / "first.safetensors"), "--version", "0")
    assert first.returncode == 0
    before = safetensors.torch.load_file(tmp_path / "first.safetensors")
    assert before.keys() == weights.keys() and any(not torch.equal(before[name], weights[name]) for name in weights)


def test_sigterm_ends_unit_and_aggregator_and_the_same_commands_go_on(processes: Processes, text: Path, tmp_path: Path) -> None:
    url = create(tmp_path / "run", text, 20_000)
    aggregator = processes.start("aggregate", url, "--poll", "0.05")
    unit = processes.start("unit", url, "--name", "a", "--step-delay", "0.2", "--poll", "0.1", "--heartbeat", "0.5")
    deadline = time.monotonic() + 90
    while json.loads(run("status", url, "--json").stdout)["version"] < 3:
        assert time.monotonic() < deadline
    for process in (unit, aggregator):
        process.send_signal(signal.SIGTERM)
    out, _ = unit.communicate(timeout=60)
    assert unit.returncode == 0 and "contribution(s) published; state saved" in out, out
    out, _ = aggregator.communicate(timeout=60)
    assert aggregator.returncode == 0 and "stopped; everything is in the bucket" in out, out

    once = run("aggregate", url, "--once")
    assert once.returncode == 0
    assert "nothing to merge" in run("aggregate", url, "--once").stdout
    aggregator = processes.start("aggregate", url, "--poll", "0.05")
    again = run("unit", url, "--name", "a", "--poll", "0.1")
    assert again.returncode == 0, again.stdout + again.stderr
    assert aggregator.wait(timeout=60) == 0
    row = json.loads(run("status", url, "--json").stdout)["units"]["a"]
    assert row["incarnation"] == 1
    assert row["report"]["inner_steps"] > row["report"]["steps"], "the second process goes on from the state of the first"


def test_every_setting_is_in_the_example_and_the_example_is_accepted(tmp_path: Path, text: Path) -> None:
    example = run("init", "--example")
    assert example.returncode == 0
    values = tomllib.loads(example.stdout)
    assert values["outer"]["lr"] == 0.7 and values["program"]["model"]["width"] == 128
    config = tmp_path / "run.toml"
    config.write_text(example.stdout)
    made = run("init", str(tmp_path / "run"), "--config", str(config), *TINY, "--set", f'program.data.source="{text}"')
    assert made.returncode == 0, made.stderr


def test_help_names_every_command() -> None:
    out = run("--help").stdout
    for command in ("demo", "init", "unit", "aggregate", "status", "versions", "export"):
        assert command in out
        assert run(command, "--help").returncode == 0
