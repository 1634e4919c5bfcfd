"""Trees like a tree of arrays, matched with it leaf by leaf: dims, shapes, errors.

A tree may hold nodes of any registered kind, also such that look like arrays: an `nnx.Param` has a
shape, and is no leaf. Nodes match by their type and keys; what else a node remembers (the metadata
of a Param) does not count.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np

from geojax.errors import UserError

PyTree: TypeAlias = Any

_registry = jax.tree_util.default_registry


def leaf_names(tree: PyTree) -> list[str]:
    """Return each leaf's path as it is written after the tree's name; "" for a lone array."""
    return [_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]


def spread_dims(dims: PyTree, tree: PyTree) -> list[int]:
    """Return a dimension for each leaf of `tree`; `dims` is an int, or a tree (or prefix) of them.

    Raises:
        UserError: `dims` is not shaped like `tree`, or holds something other than integers.
    """
    wanted = "dims must be one int or a tree of ints like the tree of arrays"
    spread = list(_matched(dims, tree, "dims", wanted, covers=lambda dim, node: _is_leaf(dim)))
    for dim in spread:
        if isinstance(dim, bool) or not isinstance(dim, int | np.integer):
            raise UserError(f"collectives: dims must be integers, not {_brief(dim)}")
    return [int(dim) for dim in spread]


def spread_shapes(shapes: PyTree, tree: PyTree) -> list[tuple[int, ...]]:
    """Return the shape of each leaf of `tree`; `shapes` holds tuples of ints or things with one.

    Raises:
        UserError: `shapes` is not shaped like `tree`.
    """
    wanted = (
        "shapes must be a tree like the shards, of tuples of ints or of things with a shape (the "
        "tree of whole leaves itself would do)"
    )
    found = list(_matched(shapes, tree, "shapes", wanted, covers=_is_shape_of))
    for name, shape in zip(leaf_names(tree), found, strict=True):
        if not _is_shape(shape):
            raise UserError(f"collectives: shapes{name} is {_brief(shape)}; {wanted}")
    return [tuple(shape) if isinstance(shape, tuple) else tuple(shape.shape) for shape in found]


def spread_errors(
    errors: PyTree, tree: PyTree, shapes: Sequence[tuple[int, ...]]
) -> list[jax.Array]:
    """Return the error feedback of each leaf of `tree`, an array of the shape in `shapes`.

    Raises:
        UserError: `errors` is not shaped like `tree`, or an array has another size.
    """
    wanted = "error_feedback must be a tree like the result; zeros of its shapes would do at first"
    found = list(_matched(errors, tree, "error_feedback", wanted, covers=_is_shape_of))
    for name, error, shape in zip(leaf_names(tree), found, shapes, strict=True):
        if not hasattr(error, "shape") or math.prod(error.shape) != math.prod(shape):
            raise UserError(
                f"collectives: error_feedback{name} is {_brief(error)} where the result has shape "
                f"{shape}; {wanted}"
            )
    return [jax.tree.leaves(error)[0] for error in found]


def _matched(
    given: PyTree,
    tree: PyTree,
    name: str,
    wanted: str,
    covers: Callable[[Any, Any], bool],
    path: tuple[Any, ...] = (),
) -> Iterator[Any]:
    """Yield what `given` holds at each leaf of `tree`.

    Where `given` is no node like that of `tree` it may stand for all leaves of it, if
    `covers(given, node)`; otherwise a UserError names the place and says what is `wanted`.
    """
    level = _registry.flatten_one_level_with_keys(tree)
    if level is None:
        yield given
        return
    children = list(level[0])
    others = list((_registry.flatten_one_level_with_keys(given) or [()])[0])
    if type(given) is type(tree) and [key for key, _ in children] == [key for key, _ in others]:
        for (key, child), (_, other) in zip(children, others, strict=True):
            yield from _matched(other, child, name, wanted, covers, (*path, key))
    elif covers(given, tree):
        yield from [given] * len(jax.tree.leaves(tree))
    else:
        at = f"{name}{_name(path).strip()}"
        raise UserError(
            f"collectives: {at} is {_difference(given, others, tree, children)}; {wanted}"
        )


def _difference(given: Any, others: list[Any], tree: Any, children: list[Any]) -> str:
    """Say how a node differs from the tree's."""
    if type(given) is not type(tree):
        return f"{_brief(given)} where the arrays have a {type(tree).__name__}"
    keys, other_keys = ([_name((key,)).strip() for key, _ in each] for each in (children, others))
    lacking = [key for key in keys if key not in other_keys]
    if lacking:
        return f"a {type(tree).__name__} without {_cut(lacking[0])}, which the arrays have"
    more = [key for key in other_keys if key not in keys] or ["other children"]
    return f"a {type(tree).__name__} with {_cut(more[0])}, which the arrays lack"


def _is_leaf(node: Any) -> bool:
    return bool(jax.tree_util.all_leaves([node]))


def _is_shape(node: Any) -> bool:
    if hasattr(node, "shape"):
        return True
    return isinstance(node, tuple) and all(isinstance(size, int | np.integer) for size in node)


def _is_shape_of(shape: Any, node: Any) -> bool:
    """Return True if `node` is one array in a wrapping that looks like it, as an `nnx.Param`."""
    return _is_shape(shape) and hasattr(node, "shape") and len(jax.tree.leaves(node)) == 1


def _brief(value: Any) -> str:
    """Describe a value in few words."""
    if value is None or isinstance(value, bool | int | float | str):
        return _cut(repr(value))
    shape = getattr(value, "shape", None)
    return f"a {type(value).__name__}" + (f" of shape {shape}" if isinstance(shape, tuple) else "")


def _name(path: Any) -> str:
    return f" {_cut(jax.tree_util.keystr(path))}" if path else ""


def _cut(text: str) -> str:
    return text if len(text) <= 120 else f"{text[:50]}...{text[-60:]}"
