"""The verbs of the `geojax` command, whose modules are imported when they are used.

The first line of a run appears within a second. So a verb costs its own imports alone, and the list
of all verbs is read from their sources.
"""

import ast
import functools
import importlib
import inspect
import itertools
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from geojax.errors import UserError


class Verb(NamedTuple):
    """A verb: the module that runs it, and the class of its arguments."""

    module: str
    """Module of `geojax.cli` with a function `run`."""
    arguments: str
    """Name of the class."""
    defined_in: str | None = None
    """Module of `geojax.cli` that defines the class; None: the verb's own."""
    changes_settings: bool = False
    """True if options that it does not know change settings of its config."""
    uses_jax: bool = True
    """True if it needs JAX, and an environment that JAX can run in."""
    announces: bool = False
    """True if its module has a function `announce`, which prints a line before JAX is imported."""


VERBS = {
    "train": Verb("train", "TrainCommand", changes_settings=True, announces=True),
    "watch": Verb("watch", "WatchCommand", uses_jax=False),
    "report": Verb("report", "ReportCommand", uses_jax=False),
    "plan": Verb("plan", "PlanCommand", "plan_options", changes_settings=True, announces=True),
    "config show": Verb("config_commands", "ShowCommand", changes_settings=True),
    "config diff": Verb("config_commands", "DiffCommand"),
    "config new": Verb("config_commands", "NewCommand"),
    "config schema": Verb("config_commands", "SchemaCommand"),
    "probe": Verb("probe", "ProbeCommand", changes_settings=True),
    "export": Verb("export", "ExportCommand"),
    "generate": Verb("generate", "GenerateCommand"),
    "evaluate": Verb("evaluate", "EvaluateCommand"),
    "data prepare": Verb("data", "PrepareCommand"),
    "data show": Verb("data_show", "DataShowCommand", changes_settings=True),
    "launch": Verb("launch", "LaunchCommand", uses_jax=False),
    "wan up": Verb("wan", "WanUpCommand"),
    "wan down": Verb("wan", "WanDownCommand"),
    "wan status": Verb("wan", "WanStatusCommand"),
    "wan cut": Verb("wan", "WanCutCommand"),
    "wan restore": Verb("wan", "WanRestoreCommand"),
}

RENAMED = {
    "memory": "plan",
    "compile": "plan --compile",
    "simulate": "plan --schedules",
    "settings": "train --help [SECTION]",
    "wan mend": "wan restore",
}
"""Earlier names of verbs."""

GROUPS = frozenset(name.partition(" ")[0] for name in VERBS if " " in name)
"""First words of the verbs of two words."""


def arguments_class(name: str) -> type[Any]:
    """Return the class of a verb's arguments."""
    verb = VERBS[name]
    module = imported(f"geojax.cli.{verb.defined_in or verb.module}")
    command: type[Any] = getattr(module, verb.arguments)
    return command


def module_of(name: str) -> ModuleType:
    """Return the module that runs a verb."""
    return imported(f"geojax.cli.{VERBS[name].module}")


def imported(module: str) -> ModuleType:
    """Import a module, which may be the first to import JAX.

    Raises:
        UserError: JAX cannot read one of its variables.
    """
    try:
        return importlib.import_module(module)
    except ValueError as error:
        raise UserError(f"JAX's variables: {error}; correct it, or unset the variable") from None


def summary(name: str) -> str:
    """Return the first sentence of a verb's help, without importing its module."""
    verb = VERBS[name]
    path = Path(__file__).with_name(f"{verb.defined_in or verb.module}.py")
    first, _, _ = (ast.get_docstring(_class_node(path, verb.arguments)) or "").partition("\n\n")
    return " ".join(first.split())


def attribute_docstrings(command: type[Any]) -> dict[str, str]:
    """Return the docstrings of a class's attributes, those of its bases included."""
    docstrings: dict[str, str] = {}
    for each in reversed(command.__mro__[:-1]):
        if each.__module__.startswith("geojax."):
            source = inspect.getsourcefile(each)
            assert source is not None, f"{each} has a source"
            body = _class_node(Path(source), each.__name__).body
            for field, text in itertools.pairwise(body):
                if (
                    isinstance(field, ast.AnnAssign)
                    and isinstance(field.target, ast.Name)
                    and isinstance(text, ast.Expr)
                    and isinstance(text.value, ast.Constant)
                ):
                    docstrings[field.target.id] = inspect.cleandoc(str(text.value.value))
    return docstrings


@functools.cache
def _parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def _class_node(path: Path, name: str) -> ast.ClassDef:
    """Return the definition of a class at the top of a module's source."""
    classes = (node for node in _parsed(path).body if isinstance(node, ast.ClassDef))
    return next(node for node in classes if node.name == name)
