"""Names of a package that are imported from their modules when they are first used."""

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def importer(package: str, names: Mapping[str, str]) -> Callable[[str], Any]:
    """Return the `__getattr__` of a package that imports names when they are first used.

    Args:
        package: its name.
        names: of each module, with spaces between them.
    """
    modules = {name: module for module, own in names.items() for name in own.split()}

    def imported(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module '{package}' has no attribute '{name}'")
        value = getattr(import_module(modules[name]), name)
        setattr(sys.modules[package], name, value)
        return value

    return imported
