"""The families of models, one file each: keys of `config.json`, tensors, and what is special.

This module lists the folder: a new file is a new family. Of a file's families the plainest stands
first, and of two that can express a model the one whose file is first by name is written.
"""

import importlib
import pkgutil

from geojax.models.huggingface.family import Family


def _families() -> tuple[Family, ...]:
    names = sorted(each.name for each in pkgutil.iter_modules(__path__))
    modules = [importlib.import_module(f"{__name__}.{name}") for name in names]
    found = [value for module in modules for value in vars(module).values()]
    return tuple({each.model_type: each for each in found if isinstance(each, Family)}.values())


FAMILIES = _families()
"""All families."""
