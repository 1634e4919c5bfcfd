"""The leaves of a tree by their paths, and their types as text, as checkpoints record them."""

from collections.abc import Iterable, Mapping
from typing import Any

import jax

ERROR_FEEDBACK, AMAX_HISTORY = "error_feedback", "amax_history"
_EXPENDABLE = (f"{ERROR_FEEDBACK}.", f"{AMAX_HISTORY}.")


def is_expendable(name: str) -> bool:
    """Return True for what each site has for itself and a run can begin anew, with zeros.

    They are the rounding errors and the amax histories of the sites.
    """
    return name.startswith(_EXPENDABLE)


def leaf_name(path: jax.tree_util.KeyPath) -> str:
    """Return a leaf's path as "parameters.layers.query"."""
    return jax.tree_util.keystr(path, simple=True, separator=".")


def leaves_by_name(tree: Any) -> dict[str, Any]:
    """Return the leaves of a tree by `leaf_name`, in the tree's order."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    named = {leaf_name(path): leaf for path, leaf in leaves}
    assert len(named) == len(leaves), "two leaves of the tree have the same path"
    return named


def leaves_of_parts(trees: Iterable[Any]) -> dict[str, Any]:
    """Return the leaves of all trees by `leaf_name`; a leaf may be in several of them."""
    return {name: leaf for tree in trees for name, leaf in leaves_by_name(tree).items()}


def describe_arrays(arrays: Mapping[str, Any]) -> dict[str, str]:
    """Return each array's type by name, as "float32[100,64]"."""
    return {name: _description(array) for name, array in arrays.items()}


def shape_and_dtype(described: str) -> tuple[tuple[int, ...], str]:
    """Read an array's type from `describe_arrays`: "float32[100,64]" as (100, 64) and "float32"."""
    dtype, _, sizes = described.rstrip("]").partition("[")
    return tuple(int(size) for size in sizes.split(",") if size), dtype


def _description(array: Any) -> str:
    """Return an array's type as "float32[100,64]"."""
    return f"{array.dtype}[{','.join(str(size) for size in array.shape)}]"
