"""Puts what ``--json`` wrote into the tables of ``docs/performance.md``, between ``<!-- figures NAME -->`` and ``<!-- end -->``.

python -m benchmarks.codec --json benchmarks/results/codec.json
python -m benchmarks.page                                         # from all of benchmarks/results
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from typing import Any

from benchmarks.measure import ROOT, cell_text

RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "performance.md"
ROWS_MAX = 4
"""Of a table of stages, on the page. The file has all."""
FILE_ONLY = (
    "Stages of a cut",
    "Stages of the naive",
    "Single passes",
    "Around a cut, 0.8M",
    "Stages of ours: fetch",
    "Stages of an outer step, first pass",
    "Stages of encode int8",
    "Stages of decode int8",
)
"""Titles of tables that are in the file only."""
BLOCK = re.compile(r"(<!-- figures (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def table(found: dict[str, Any]) -> str:
    """A table as Markdown."""
    columns = found["columns"]
    lines = ["| " + " | ".join(columns) + " |", "|" + "|".join(["---"] + ["---:"] * (len(columns) - 1)) + "|"]
    rows = found["rows"][:ROWS_MAX] if found["title"].startswith("Stages") else found["rows"]
    lines += ["| " + " | ".join(cell_text(cell) for cell in row) + " |" for row in rows]
    if len(rows) < len(found["rows"]):
        lines.append(f"| {len(found['rows']) - len(rows)} smaller ones" + " |" * len(columns))
    return "\n".join(lines)


def block(result: dict[str, Any]) -> str:
    """What one run found: command, figures, machine, and the other tables folded."""
    first, *others = result["tables"]
    parts = []
    if result["provisional"]:
        parts.append("**Provisional**: the machine was not quiet; to be replaced by a run of this command on a quiet one.")
    parts += [f"`{result['command']}`", table(first), ", ".join(f"{name} {value}" for name, value in result["machine"].items())]
    folded = [f"{other['title']}\n\n{table(other)}" for other in others if not other["title"].startswith(FILE_ONLY)]
    folded += ["\n".join(f"- {note}" for note in result["notes"])]
    parts.append("<details><summary>Where the time goes, and the rest</summary>\n\n" + "\n\n".join(folded) + "\n\n</details>")
    return "\n\n".join(parts) + "\n"


def filled(page: str, results: dict[str, dict[str, Any]]) -> str:
    """``page`` with the blocks of those benchmarks that there are results of."""

    def fill(match: re.Match[str]) -> str:
        result = results.get(match[2])
        return match[0] if result is None else f"{match[1]}\n{block(result)}\n{match[3]}"

    return BLOCK.sub(fill, page)


def standing_results() -> dict[str, dict[str, Any]]:
    """Benchmark -> what its file in ``benchmarks/results`` says."""
    return {path.stem: json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args(argv)
    PAGE.write_text(filled(PAGE.read_text(), standing_results()))


if __name__ == "__main__":
    main()
