"""Find names of parameters in strings: outside their modules, facts go by declarations.

    python tests/support/parameter_names.py

A name counts where a string looks a parameter up: `tree["kernel"]`, `tree.get("kernel")`, a
comparison, `startswith`. The parts of a model (`embedding`, `layers`, ...) are the tree's
structure, and a batch has names of its own.
"""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import jax

from geojax.models import ModelConfig
from geojax.models.parameters import declarations
from geojax.step.program import batch_shape

PACKAGE = Path(__file__).resolve().parents[2] / "geojax"
PRESETS = PACKAGE.parent / "configs" / "model"
OWN_FILES = (
    "models/families/",
    "models/huggingface/",
    "models/declaration.py",
    "models/lora.py",
    "models/moe/",
)
"""Files of families, tables of Hugging Face's names, and modules whose own they are."""

OTHER_WORDS = frozenset(["attention", "key", "value"])
"""Names that are words of other subjects too."""

LOOKS_UP = ("get", "pop", "startswith", "endswith", "removeprefix", "removesuffix")


class Hit(NamedTuple):
    """A string that names a parameter."""

    path: str
    line: int
    name: str


def parameter_names() -> frozenset[str]:
    """The names of parameters and modules in the trees of all presets, below a tree's parts."""
    found: set[str] = set()
    parts: set[str] = set()
    for preset in PRESETS.glob("*.yaml"):
        tree = declarations(ModelConfig.load(preset.stem))
        parts |= tree.keys()
        for path, _ in jax.tree_util.tree_leaves_with_path(tree):
            found.update(entry.key for entry in path[1:])
    return frozenset(found - parts - set(batch_shape(1, 8)) - OTHER_WORDS)


def hits(names: frozenset[str]) -> Iterator[Hit]:
    """Yield the strings that look a parameter up."""
    for file in sorted(PACKAGE.rglob("*.py")):
        where = file.relative_to(PACKAGE).as_posix()
        if where.startswith(OWN_FILES):
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            for text in _looked_up(node):
                if isinstance(text.value, str) and text.value.strip(".") in names:
                    yield Hit(where, text.lineno, text.value)


def _looked_up(node: ast.AST) -> Iterator[ast.Constant]:
    places: list[ast.expr] = []
    if isinstance(node, ast.Subscript):
        places = [node.slice]
    elif isinstance(node, ast.Compare):
        places = [node.left, *node.comparators]
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        places = node.args if node.func.attr in LOOKS_UP else []
    for place in places:
        elements = place.elts if isinstance(place, ast.Tuple | ast.List | ast.Set) else [place]
        yield from (each for each in elements if isinstance(each, ast.Constant))


if __name__ == "__main__":
    for each in hits(parameter_names()):
        print(f"geojax/{each.path}:{each.line}: '{each.name}'")
