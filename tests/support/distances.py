"""Distances of a result from an exact one, leaf by leaf, and the bounds that tests hold them to.

A result in float64 is held to a tolerance. One in float32 is held to one device in float32: sums
are rounded in an order that the layout, the compiler and the processor's instructions choose, so
that no tolerance suits all models and machines.
"""

from typing import Any

import jax
import numpy as np

TIMES = 4
"""How many times as far as one device's a result in float32 may be from the one in float64."""

FLOOR = 8
"""The rounding errors in float32 (of the largest entry) that each leaf may have in any case.

One device's result may by chance be exact, most often where a leaf is a single number."""


def distances(actual: Any, exact: Any, zero_leaves: tuple[str, ...] = ()) -> dict[str, float]:
    """Return the largest error of each leaf, relative to the largest entry of the leaf.

    Of an array that several processes hold, each looks at its own shards. `zero_leaves` are zero
    but for rounding: theirs are relative to the largest entry of all leaves.
    """
    leaves = {_name(path): np.asarray(leaf) for path, leaf in _leaves(exact)}
    largest = {name: np.abs(leaf).max() for name, leaf in leaves.items()}
    of_all = max(largest.values())
    found = {}
    for path, leaf in _leaves(actual):
        name = _name(path)
        parts = [(np.asarray(part), leaves[name][index]) for part, index in _parts(leaf)]
        error = np.max([np.abs(part - wanted).max() for part, wanted in parts])
        found[name] = float(error / (of_all if name in zero_leaves else largest[name]))
    assert found.keys() == leaves.keys(), "the trees must have the same leaves"
    return found


def assert_within(tolerance: float, found: dict[str, float]) -> None:
    """Fail if a distance is above `tolerance`, or NaN."""
    far = {name: error for name, error in found.items() if not error <= tolerance}
    assert not far, f"relative errors above {tolerance}: {far}"


def assert_no_further_than(one_device: dict[str, float], found: dict[str, float]) -> None:
    """Fail if a result is further from the float64 one than `TIMES` times one device's, or NaN.

    Args:
        one_device: `distances` of one device's result from the same in float64.
        found: `distances` of the result from it.
    """
    floor = FLOOR * float(np.finfo(np.float32).eps)
    bounds = {name: max(TIMES * error, floor) for name, error in one_device.items()}
    assert bounds.keys() == found.keys(), "the trees must have the same leaves"
    far = {
        name: f"{error:.1e}, one device {one_device[name]:.1e}"
        for name, error in found.items()
        if not error <= bounds[name]
    }
    assert not far, f"further from float64 than {TIMES} times one device: {far}"


def _leaves(tree: Any) -> list[tuple[Any, Any]]:
    return jax.tree_util.tree_leaves_with_path(tree)


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")


def _parts(leaf: Any) -> list[tuple[Any, Any]]:
    """The parts of a leaf that this process holds, and where they lie in it."""
    if isinstance(leaf, jax.Array):
        return [(shard.data, shard.index) for shard in leaf.addressable_shards]
    return [(leaf, ...)]
