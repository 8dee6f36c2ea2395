"""What the documents say exists: links, commands, settings, Python."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
import typer

from ps_diloco.cli.main import app

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "benchmarks").glob("*.md"), *(ROOT / "infra").glob("*.md")])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_to_files_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), target


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)


def test_the_readme_tells_its_story_in_under_200_lines() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) < 200


def test_python_in_the_readme_parses() -> None:
    assert blocks("python")
    for block in blocks("python"):
        ast.parse(block)


def test_commands_in_the_readme_exist_with_their_options() -> None:
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    known = {
        name: {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
        for name, command in commands.items()
    }
    lines = [line for block in blocks("sh") for line in block.splitlines() if line.startswith("ps-diloco ")]
    assert len(lines) >= 5
    for line in lines:
        words = line.partition("#")[0].split()
        assert words[1] in known, line
        for word in words[2:]:
            assert not word.startswith("--") or word in known[words[1]], line


def test_make_targets_in_the_readme_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in {line.split()[1] for block in blocks("sh") for line in block.splitlines() if line.startswith("make ")}:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_every_setting_is_in_the_bucket_format() -> None:
    from ps_diloco.config import RunSettings

    page = (ROOT / "docs" / "bucket-format.md").read_text()
    for section, field in RunSettings.model_fields.items():
        default = field.get_default(call_default_factory=True)
        for name in getattr(type(default), "model_fields", {section: field}):
            assert f"`{name}`" in page, name
