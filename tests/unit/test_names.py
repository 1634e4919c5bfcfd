"""Names and sentences: American spelling, and every docstring stands alone."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
BRITISH = (
    r"\b([Nn]eighbour|[Cc]olour|[Bb]ehaviour|[Ff]avour)"
    r"|\b([Nn]ormalis|[Uu]tilis|[Ii]nitialis|[Oo]ptimis|[Ss]erialis|[Ss]ynchronis|[Mm]aterialis"
    r"|[Tt]okenis)"
)
BANNED_OPENINGS = ("What", "Whether", "Those", "Of", "Which", "How", "Where", "From", "By")
MODULES = sorted((REPOSITORY / "geojax").rglob("*.py"))


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


def test_spelling_is_american():
    files = [REPOSITORY / "README.md", *MODULES]
    for folder, pattern in (("configs", "*.yaml"), ("docs", "*.md"), ("geojax", "*.c")):
        files += (REPOSITORY / folder).rglob(pattern)
    found = [
        f"{path.relative_to(REPOSITORY)}:{number}: {line.strip()}"
        for path in files
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if re.search(BRITISH, line)
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
