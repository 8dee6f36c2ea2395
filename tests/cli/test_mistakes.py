"""A user's mistake: a clear message, the right exit code, no traceback, nothing lost."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.command import TINY, run


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    place = tmp_path_factory.mktemp("run")
    text = place / "text.txt"
    text.write_text("some text. " * 1000)
    made = run("init", str(place / "run"), *TINY, "--set", f'program.data.source="{text}"')
    assert made.returncode == 0, made.stderr
    return str(place / "run")


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (("status", "{tmp}/nothing"), 2, "there is no run at this URL"),
        (("status", "s3://"), 2, "names no bucket"),
        (("status", "gs://bucket/run"), 2, "not the URL of a store"),
        (("status", "s3://some-bucket/run"), 3, "AWS_ACCESS_KEY_ID"),
        (("init", "{url}"), 2, "a run exists at this URL"),
        (("init", "{tmp}/new", "--set", "outer.lrr=1"), 2, "did you mean 'lr'"),
        (("init", "{tmp}/new", "--set", 'outer.lr="fast"'), 2, "'outer.lr' = 'fast'"),
        (("init", "{tmp}/new", "--set", "outer"), 2, "section.name=value"),
        (("init", "{tmp}/new", "--config", "{tmp}/none.toml"), 2, "no such configuration file"),
        (("init",), 2, "RUN"),
        (("unit", "{url}", "--name", "Bad_Name"), 2, "a unit name has"),
        (("unit", "{url}", "--name", "a", "--region", "mars"), 2, "no such active region"),
        (("unit", "{url}"), 2, "--name"),
        (("export", "{url}", "{tmp}/model.onnx"), 2, ".safetensors"),
        (("export", "{url}", "{tmp}/none/model.pt"), 2, "directory does not exist"),
        (("export", "{url}", "{tmp}/model.pt", "--version", "99"), 3, "no such version"),
        (("aggregate", "{url}", "--part", "3/2"), 2, "I from 1 to N"),
        (("nonsense",), 2, "nonsense"),
    ],
)
def test_a_mistake_is_explained(arguments: tuple[str, ...], code: int, says: str, url: str, tmp_path: Path) -> None:
    done = run(*(argument.format(url=url, tmp=tmp_path) for argument in arguments))
    assert done.returncode == code, done.stderr
    assert says in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "new").exists(), "a refused init leaves nothing behind"
