"""What of geojax a room reaches by its imports, and which classes say the same.

    python tests/support/house.py [--from geojax.train] [--tree REPOSITORY]

An import counts wherever it stands: at the top of a module, inside a function, or as a module's
name in a string. A name that its package imports when it is first used counts where it is used.
Reaching a module reaches its packages too. Two classes say the same if five of their fields share
names.
"""

import argparse
import ast
import functools
import itertools
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY / "tests"))

from support.code_lines import code_lines

SHARED_FIELDS = 5


class SharedFields(NamedTuple):
    """Two classes, and the names of the fields that both have."""

    first: str
    second: str
    fields: tuple[str, ...]


def modules_of(package: Path) -> dict[str, Path]:
    """List the modules of a package by name."""
    found = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@functools.cache
def nodes_of(path: Path) -> list[ast.AST]:
    """List the nodes of a module's syntax."""
    return list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))


@functools.cache
def names_of(path: Path) -> dict[str, str]:
    """Return the modules of the names that a package imports when they are first used."""
    for node in nodes_of(path):
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "_NAMES":
            modules = ast.literal_eval(node.value)
            return {name: module for module, names in modules.items() for name in names.split()}
    return {}


def imports_of(path: Path, modules: dict[str, Path]) -> set[str]:
    """Return the modules that the one at `path` names in an import or in a string.

    A package that imports its names when they are first used reaches nothing by them: who imports
    such a name does.
    """
    if names_of(path):
        return set()
    known, named = set(modules), set()
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            named |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            later = names_of(modules[node.module]) if node.module in known else {}
            named |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
            named |= {later[alias.name] for alias in node.names if alias.name in later}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            named.add(node.value.partition(":")[0])
    return named & known


def reachable(modules: dict[str, Path], room: str) -> set[str]:
    """Return the modules that those of `room` reach, itself included."""
    waiting = [name for name in modules if name == room or name.startswith(f"{room}.")]
    reached: set[str] = set()
    while waiting:
        name = waiting.pop()
        if name in reached:
            continue
        reached.add(name)
        waiting += imports_of(modules[name], modules)
        package, _, _ = name.rpartition(".")
        if package in modules:
            waiting.append(package)
    return reached


def lines_of(modules: dict[str, Path], names: Iterable[str]) -> int:
    """Count the lines of code of modules."""
    return sum(code_lines(modules[name].read_text(encoding="utf-8")) for name in names)


def shared_fields(modules: dict[str, Path]) -> list[SharedFields]:
    """Find the pairs of classes that share five fields, unless one derives from the other."""
    fields: dict[str, set[str]] = {}
    bases: dict[str, set[str]] = {}
    for module, path in modules.items():
        for node in nodes_of(path):
            if isinstance(node, ast.ClassDef):
                name = f"{module}.{node.name}"
                bases[name] = {base.id for base in node.bases if isinstance(base, ast.Name)}
                fields[name] = {
                    statement.target.id
                    for statement in node.body
                    if isinstance(statement, ast.AnnAssign)
                    and isinstance(statement.target, ast.Name)
                    and "ClassVar" not in ast.unparse(statement.annotation)
                }
    found = []
    for first, second in itertools.combinations(sorted(fields), 2):
        both = fields[first] & fields[second]
        related = first.rpartition(".")[2] in bases[second] or (
            second.rpartition(".")[2] in bases[first]
        )
        if len(both) >= SHARED_FIELDS and not related:
            found.append(SharedFields(first, second, tuple(sorted(both))))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--from", dest="room", default="geojax.train", help="room that imports")
    parser.add_argument("--tree", type=Path, default=REPOSITORY, help="another checkout")
    arguments = parser.parse_args()
    modules = modules_of(arguments.tree / "geojax")
    reached = reachable(modules, arguments.room)
    lines, all_lines = lines_of(modules, reached), lines_of(modules, modules)
    print(
        f"{arguments.room} reaches {len(reached)} of {len(modules)} modules, {lines:,} of "
        f"{all_lines:,} lines of code"
    )
    for room in ("geojax.planner", "geojax.pipeline.simulation", "geojax.hlo"):
        inside = [name for name in reached if name == room or name.startswith(f"{room}.")]
        print(f"  {room}: {len(inside)} modules, {lines_of(modules, inside):,} lines")
    pairs = shared_fields(modules)
    print(f"{len(pairs)} pairs of classes share {SHARED_FIELDS} fields or more")
    for pair in pairs:
        print(f"  {pair.first}, {pair.second}: {', '.join(pair.fields)}")


if __name__ == "__main__":
    main()
