"""Benchmarks and examples find what they import."""

import ast
import importlib
import sys
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[3]
BENCHMARKS = REPOSITORY / "benchmarks"
SCRIPTS = sorted(
    [*BENCHMARKS.glob("step_time/*_worker.py"), *BENCHMARKS.glob("generation_sides/*_side.py")]
)
COMPARED_WITH = {"torch", "transformers"}
"""What is installed for comparisons alone."""


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_a_worker_finds_its_modules(script, monkeypatch):
    installed = list(sys.path)
    monkeypatch.syspath_prepend(BENCHMARKS)
    folders = [str(folder) for folder in importlib.import_module("worker").FOLDERS]
    imported = set()
    for node in ast.walk(ast.parse(script.read_text())):
        if isinstance(node, ast.Import):
            imported |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add(node.module.partition(".")[0])
    assert "protocol" in imported
    for name in imported - COMPARED_WITH - sys.stdlib_module_names:
        assert PathFinder.find_spec(name, [*folders, *installed]), name


@pytest.mark.parametrize("folder", ["benchmarks", "examples"])
def test_every_name_of_geojax_is_there(folder):
    missing = []
    for script in sorted((REPOSITORY / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(script.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module.partition(".")[0] == "geojax":
                module = importlib.import_module(node.module)
                missing += [
                    f"{script.relative_to(REPOSITORY)}: {node.module}.{alias.name}"
                    for alias in node.names
                    if not hasattr(module, alias.name)
                    and not find_spec(f"{node.module}.{alias.name}")
                ]
    assert missing == []
