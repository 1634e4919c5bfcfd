"""Names and sentences: no old name comes back, and every docstring stands alone."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
OLD_NAMES = REPOSITORY / "tests" / "support" / "old_names.txt"
RENAMED_KEYS = REPOSITORY / "geojax" / "renamed_keys.py"  # names them on purpose
BANNED_OPENINGS = ("What", "Whether", "Those", "Of", "Which", "How", "Where", "From", "By")
MODULES = sorted((REPOSITORY / "geojax").rglob("*.py"))


def old_names() -> list[str]:
    lines = OLD_NAMES.read_text().splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def checked_files() -> list[Path]:
    found = [REPOSITORY / "README.md", *MODULES]
    for folder, pattern in (("configs", "*.yaml"), ("docs", "*.md"), ("geojax", "*.c")):
        found += (REPOSITORY / folder).rglob(pattern)
    return [path for path in found if path != RENAMED_KEYS]


def docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and text of every docstring: of modules, classes, functions and attributes."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if not isinstance(body, list):
            continue
        for statement in body:
            if (
                isinstance(statement, ast.Expr)
                and isinstance(statement.value, ast.Constant)
                and isinstance(statement.value.value, str)
            ):
                yield statement.lineno, statement.value.value


@pytest.mark.parametrize("pattern", old_names())
def test_an_old_name_is_found_nowhere(pattern):
    expression = re.compile(pattern)
    found = [
        f"{path.relative_to(REPOSITORY)}:{number}: {line.strip()}"
        for path in checked_files()
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if expression.search(line)
    ]
    assert not found, "\n".join(found)


def test_no_docstring_opens_like_a_fragment():
    opening = re.compile(rf"\s*({'|'.join(BANNED_OPENINGS)})\b")
    found = [
        f"{path.relative_to(REPOSITORY)}:{line}: {text.splitlines()[0]}"
        for path in MODULES
        for line, text in docstrings(ast.parse(path.read_text()))
        if opening.match(text)
    ]
    assert not found, f"{len(found)} fragments:\n" + "\n".join(found)
