"""Who may import whom, read from the source without running it.

The bucket is the only bus: units' programs and the aggregator do not know each other, the library knows neither, and the modules
that the format's formulas live in know no store and no clock.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("ps_diloco", "aggregator", "workers")
PURE = ("errors", "ids", "records", "layout", "config", "merge", "outer", "progress", "codecs", "shard", "hashing")
IMPURE = ("store", "run", "log", "unit", "cli")
CLOCK_AND_CHANCE = ("time", "random", "secrets", "datetime", "uuid")
RUNS_CODE = ("pickle", "cPickle", "_pickle", "cloudpickle", "dill", "shelve", "marshal", "joblib")


@dataclass(frozen=True)
class Import:
    """One name that a file imports: ``module`` dotted and absolute."""

    module: str
    file: str
    line: int
    inside_function: bool

    def is_of(self, *packages: str) -> bool:
        return any(self.module == package or self.module.startswith(package + ".") for package in packages)

    def __str__(self) -> str:
        return f"{self.file}:{self.line} imports {self.module}"


def imports_in(tree: ast.AST, file: str) -> Iterator[Import]:
    """All imports of a file, also those inside functions, under TYPE_CHECKING, relative, or by ``import_module`` with a literal name."""
    package = Path(file).parent.parts

    def walk(node: ast.AST, inside: bool) -> Iterator[Import]:
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = (
                ".".join([*package[: len(package) - node.level + 1], *([node.module] if node.module else [])])
                if node.level
                else node.module or ""
            )
            names = [f"{base}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant) and isinstance(node.args[0].value, str):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id if isinstance(node.func, ast.Name) else ""
            if called in ("import_module", "__import__"):
                names = [node.args[0].value]
        for name in names:
            yield Import(name, file, node.lineno, inside)  # type: ignore[attr-defined]
        inside = inside or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        for child in ast.iter_child_nodes(node):
            yield from walk(child, inside)

    return walk(tree, inside=False)


@cache
def trees() -> dict[str, ast.Module]:
    """file, relative to the repository -> its syntax tree."""
    files = [file for package in PACKAGES for file in sorted((ROOT / package).rglob("*.py"))]
    return {file.relative_to(ROOT).as_posix(): ast.parse(file.read_text(encoding="utf-8")) for file in files}


@cache
def all_imports() -> tuple[Import, ...]:
    return tuple(found for file, tree in trees().items() for found in imports_in(tree, file))


def _texts(found: list[Import]) -> list[str]:
    return [str(one) for one in found]


def _of(package: str) -> list[Import]:
    return [one for one in all_imports() if one.file.startswith(package + "/")]


def test_there_is_something_to_look_at() -> None:
    assert {file.split("/")[0] for file in trees()} >= {"ps_diloco"}
    assert any(one.is_of("torch") for one in all_imports())
    assert all(f"ps_diloco/{name}.py" in trees() for name in PURE)


def test_workers_and_aggregator_do_not_know_each_other() -> None:
    assert _texts([one for one in _of("workers") if one.is_of("aggregator")]) == []
    assert _texts([one for one in _of("aggregator") if one.is_of("workers")]) == []


def test_the_library_knows_neither_but_its_command_line_may_start_them() -> None:
    found = [one for one in _of("ps_diloco") if one.is_of("workers", "aggregator")]
    assert _texts([one for one in found if not (one.file.startswith("ps_diloco/cli/") and one.inside_function)]) == []


@pytest.mark.parametrize(
    ("packages", "allowed"),
    [
        (("boto3", "botocore"), ("ps_diloco/store/s3.py",)),
        (("fsspec", "s3fs", "gcsfs"), ("workers/data.py", "ps_diloco/store/fsspec.py")),
        (("google.cloud", "google.auth", "google.api_core", "google.oauth2"), ("ps_diloco/store/gcs.py",)),
    ],
)
def test_the_sdk_of_a_store_is_known_to_its_adapter_only(packages: tuple[str, ...], allowed: tuple[str, ...]) -> None:
    assert _texts([one for one in all_imports() if one.is_of(*packages) and one.file not in allowed]) == []


@pytest.mark.parametrize("name", PURE)
def test_a_pure_module_reaches_no_store_directly_or_by_way_of_another(name: str) -> None:
    reached, waiting = {"ps_diloco"}, [f"ps_diloco.{name}"]
    while waiting:
        module = waiting.pop()
        path = module.replace(".", "/")
        file = next((file for file in (f"{path}.py", f"{path}/__init__.py") if file in trees()), None)
        if module in reached or file is None:
            continue
        reached.add(module)
        assert not any(module == f"ps_diloco.{part}" or module.startswith(f"ps_diloco.{part}.") for part in IMPURE), module
        waiting += [one.module for one in imports_in(trees()[file], file)]
        waiting += [one.module.rpartition(".")[0] for one in imports_in(trees()[file], file)]
    assert reached >= {f"ps_diloco.{name}"}


def test_one_module_only_touches_clock_and_chance() -> None:
    watched = [one for one in [*_of("ps_diloco"), *_of("aggregator")] if not one.file.startswith("ps_diloco/cli/")]
    assert _texts([one for one in watched if one.is_of(*CLOCK_AND_CHANCE) and one.file != "ps_diloco/env.py"]) == []
    assert _texts([one for one in all_imports() if one.is_of("uuid")]) == []


def threads_made(tree: ast.AST, file: str) -> list[str]:
    """What a file uses to make or await threads, beside a plain lock and the types of ``ps_diloco.threads``."""
    found = [
        str(one)
        for one in imports_in(tree, file)
        if one.is_of("queue", "concurrent", "multiprocessing", "asyncio", "_thread", "sched", "signal", "select", "subprocess", "socket")
        and one.module not in ("concurrent.futures.Future", "concurrent.futures.Executor")
        or one.module.startswith("threading.")
    ]
    return found + [
        f"{file}:{node.lineno} uses threading.{node.attr}"
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "threading" and node.attr != "Lock"
    ]


def test_units_and_the_aggregator_have_their_threads_made_for_them() -> None:
    watched = {file: tree for file, tree in trees().items() if file.startswith(("ps_diloco/unit/", "aggregator/"))}
    assert len(watched) > 10
    assert [made for file, tree in watched.items() for made in threads_made(tree, file)] == []


@pytest.mark.parametrize(
    "line", ["threading.Thread()", "threading.Event", "import queue", "from threading import Lock", "from asyncio import run"]
)
def test_the_rule_on_threads_sees(line: str) -> None:
    assert threads_made(ast.parse(line), "x.py") != []
    assert threads_made(ast.parse("import threading\nlock = threading.Lock()\nfrom concurrent.futures import Future"), "x.py") == []


def test_nothing_that_is_read_can_run_code() -> None:
    assert _texts([one for one in all_imports() if one.is_of(*RUNS_CODE, "torch.load", "torch.package", "torch.serialization")]) == []
    calls = [
        f"{file}:{node.lineno}"
        for file, tree in trees().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr == "load" and isinstance(node.value, ast.Name) and node.value.id == "torch"
    ]
    assert calls == []
    allowed = [
        f"{file}:{node.lineno}"
        for file, tree in trees().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.keyword)
        and node.arg == "allow_pickle"
        and not (isinstance(node.value, ast.Constant) and node.value.value is False)
    ]
    assert allowed == []
    evaluated = [
        f"{file}:{node.lineno}"
        for file, tree in trees().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("eval", "exec", "compile")
    ]
    assert evaluated == []


def test_the_rules_would_see_every_way_to_import() -> None:
    source = """
import a.b, c as d
from e import f
from . import g
from ..h import i
def function():
    import j
    class Inner:
        from k import l
if TYPE_CHECKING:
    import m
importlib.import_module("n.o")
try:
    import p
except ImportError:
    p = __import__("q")
"""
    found = {one.module: one.inside_function for one in imports_in(ast.parse(source), "ps_diloco/store/x.py")}
    assert [name for name, inside in found.items() if not inside] == [
        "a.b",
        "c",
        "e.f",
        "ps_diloco.store.g",
        "ps_diloco.h.i",
        "m",
        "n.o",
        "p",
        "q",
    ]
    assert [name for name, inside in found.items() if inside] == ["j", "k.l"]
    assert Import("google.cloud.storage", "", 1, False).is_of("google.cloud")
    assert not Import("timeline", "", 1, False).is_of("time")
