"""Lines of code of a package, without blank lines, comments and docstrings.

    python tests/support/code_lines.py [FOLDER] [--before OTHER_FOLDER]

A string that stands alone as a statement, such as the description of a field, is a docstring.
"""

import argparse
import ast
import io
import tokenize
from collections import Counter
from pathlib import Path

NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}


def code_lines(source: str) -> int:
    """Count the lines of Python `source` that hold code."""
    lines = set[int]()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            value = node.value
            if isinstance(value.value, str):
                lines.difference_update(range(value.lineno, (value.end_lineno or 0) + 1))
    return len(lines)


def count(package: Path) -> tuple[Counter[str], Counter[str]]:
    """Count files and lines of code by the package's folders; "." holds its own modules."""
    files, lines = Counter[str](), Counter[str]()
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package).parts
        folder = parts[0] if len(parts) > 1 else "."
        files[folder] += 1
        lines[folder] += code_lines(path.read_text(encoding="utf-8"))
    return files, lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    default = Path(__file__).resolve().parents[2] / "geojax"
    parser.add_argument("folder", type=Path, nargs="?", default=default)
    parser.add_argument("--before", type=Path, help="the same folder of another checkout")
    arguments = parser.parse_args()
    files, lines = count(arguments.folder)
    old_files, old_lines = count(arguments.before) if arguments.before else (Counter(), Counter())
    header = f"{'folder':14} {'files':>6} {'lines':>7}"
    print(header + (f" {'before':>7} {'lines':>7}" if arguments.before else ""))
    for folder in sorted({*files, *old_files}):
        row = f"{folder:14} {files[folder]:6} {lines[folder]:7,}"
        print(row + (f" {old_files[folder]:7} {old_lines[folder]:7,}" if arguments.before else ""))
    row = f"{'total':14} {files.total():6} {lines.total():7,}"
    print(row + (f" {old_files.total():7} {old_lines.total():7,}" if arguments.before else ""))


if __name__ == "__main__":
    main()
