"""Mesh axes inside a shard_map: their names and sizes, and over which of them a value varies.

Under `check_vma=True` JAX types every value with the set of mesh axes that it *varies* over: along
those the devices may hold different values. A sum over an axis takes the axis out of the set. Scans
and custom derivatives insist that types match, varying axes included. Outside a shard_map nothing
varies, and the casts do nothing.

An axis of size 1 can be in the set too, and then the only public way out is a collective over
groups of one, which XLA for CPUs does not remove. `drop_single` is the cast that costs nothing.
"""

import math
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from geojax.collectives.order import barrier
from geojax.errors import UserError

Tree = TypeVar("Tree")

AxisNames: TypeAlias = str | Sequence[str]
"""One mesh axis, or several; their ranks are counted with the last name fastest."""


def axis_tuple(axes: AxisNames) -> tuple[str, ...]:
    """Return `axes` as a tuple of names: a lone name becomes a tuple of one."""
    return (axes,) if isinstance(axes, str) else tuple(axes)


def collective_scope(kind: str, axes: AxisNames) -> AbstractContextManager[None]:
    """Name a collective in profiles by its kind and mesh axes: `psum_scatter data,expert`."""
    return jax.named_scope(f"{kind} {','.join(axis_tuple(axes))}")


def axis_sizes(axes: Iterable[str]) -> dict[str, int]:
    """Look up the size of each axis of the surrounding shard_map.

    Raises:
        UserError: an axis is not a manual axis here.
    """
    sizes = {}
    for axis in axes:
        try:
            sizes[axis] = lax.axis_size(axis)
        except NameError:
            raise UserError(
                f"collectives: no mesh axis '{axis}' here; call inside a jax.shard_map whose mesh "
                "has it as a manual axis"
            ) from None
    return sizes


@dataclass(frozen=True)
class SiteAxes:
    """The axes of a collective, inside a site and between sites.

    Axes of size 1 carry no message: they are left out of `intra` and `inter` and only change types.
    """

    intra: tuple[str, ...]
    """Axes inside a site that are longer than 1."""
    inter: tuple[str, ...]
    """Axes between sites that are longer than 1."""
    single: tuple[str, ...]
    """Axes of size 1, inside a site or between sites."""
    all_intra: tuple[str, ...]
    """All axes inside a site, in the caller's order."""
    ranks: int
    """Number of ranks inside a site."""

    @classmethod
    def resolve(cls, intra: AxisNames, inter: AxisNames) -> "SiteAxes":
        """Look up the sizes of the axes in the surrounding shard_map.

        Raises:
            UserError: an axis is unknown, or named twice.
        """
        all_intra, all_inter = axis_tuple(intra), axis_tuple(inter)
        _check_disjoint(all_intra, all_inter)
        long_intra, single_intra, ranks = split_by_size(all_intra)
        long_inter, single_inter, _ = split_by_size(all_inter)
        return cls(long_intra, long_inter, single_intra + single_inter, all_intra, ranks)

    def drop_singles(self, leaf: jax.Array) -> jax.Array:
        """Type `leaf` as not varying over the axes of size 1."""
        return drop_single(leaf, self.single)

    def on_first_rank(self, leaf: jax.Array) -> jax.Array:
        """Keep `leaf` on the first rank of a site only, with zeros elsewhere: it counts once."""
        if not self.intra:
            return leaf
        return jnp.where(lax.axis_index(self.intra) == 0, leaf, jnp.zeros_like(leaf))


def _check_disjoint(intra: tuple[str, ...], inter: tuple[str, ...]) -> None:
    """Raise a UserError when an axis is named twice in `intra` and `inter` together."""
    named = intra + inter
    twice = sorted({axis for axis in named if named.count(axis) > 1})
    if twice:
        raise UserError(
            f"collectives: axis '{twice[0]}' is named twice in intra={intra} and inter={inter}; "
            "every axis belongs to one of them, once"
        )


def split_by_size(axes: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[str, ...], int]:
    """Split axes into (those longer than 1 in order, those of size 1, ranks over all of them)."""
    sizes = axis_sizes(axes)
    long = tuple(axis for axis in axes if sizes[axis] > 1)
    single = tuple(axis for axis in axes if sizes[axis] == 1)
    return long, single, math.prod(sizes.values())


def varying_axes(*trees: object) -> frozenset[str]:
    """Return every mesh axis that some array in `trees` varies over.

    There is none outside a shard_map, or with `check_vma=False`.
    """
    return frozenset().union(*(jax.typeof(leaf).mat.varying for leaf in jax.tree.leaves(trees)))


def to_varying(x: jax.Array, axes: Iterable[str]) -> jax.Array:
    """Type `x` as varying over `axes` too; no data moves."""
    varying = varying_axes(x)
    missing = tuple(axis for axis in axes if axis not in varying)
    return lax.pcast(x, missing, to="varying") if missing else x


def vary_over(tree: Tree, axes: frozenset[str]) -> Tree:
    """Make every array of `tree` vary over `axes` at least (backward, this sums over them)."""
    return jax.tree.map(lambda leaf: to_varying(leaf, sorted(axes)), tree)


def typed_like(x: jax.Array, typed: Any) -> jax.Array:
    """Type `x` as varying over whatever `typed` varies over, which is no less."""
    more = varying_axes(x) - varying_axes(typed)
    assert not more, f"varies over {sorted(more)} too"
    return vary_over(x, varying_axes(typed))


def zeros_of(tree: Any, *leading: int, dtype: Any = None, zero: jax.Array | float = 0.0) -> Any:
    """Make zeros in the shapes and varying axes of the arrays (or shapes) of `tree`.

    Args:
        tree: the arrays.
        leading: dims that come before theirs.
        dtype: dtype of the zeros; None: that of each array.
        zero: that of `zero_after`, which says when they are made.
    """

    def zeros(leaf: jax.Array) -> jax.Array:
        array = jnp.full((*leading, *leaf.shape), zero, dtype or leaf.dtype)
        return vary_over(array, varying_axes(leaf))

    return jax.tree.map(zeros, tree)


def unwritten(tree: Any, *leading: int, dtype: Any = None, zero: jax.Array | float = 0.0) -> Any:
    """Make arrays that hold anything until they are written; arguments are those of `zeros_of`.

    On GPUs they are memory and nothing else. Zeros would be written first, and copied where two
    loops fill arrays of one shape: 11 ms of a step of 292 ms (1.2B parameters on an H100). The
    first element is `zero`: memory that waits for nothing would be held from the step's beginning.
    """

    def memory(leaf: jax.Array) -> jax.Array:
        array = lax.empty((*leading, *leaf.shape), dtype or leaf.dtype)
        first = jnp.full([min(size, 1) for size in array.shape], zero, array.dtype)
        array = lax.dynamic_update_slice(array, first, (0,) * array.ndim)
        return vary_over(array, varying_axes(leaf))

    return jax.tree.map(memory, tree)


def zero_after(tree: Tree) -> tuple[Tree, jax.Array]:
    """Return `tree` and a zero that is known when all of `tree` has been computed.

    A large buffer that a loop fills should be made of such a zero. XLA for GPUs makes a constant
    buffer when the program begins, and makes one buffer for all equal constants. If anything else
    reads zeros of that shape, a loop gets a copy, and the original is held until then.
    """
    return barrier((tree, jnp.zeros(())))


def drop_single(x: jax.Array, axes: Iterable[str]) -> jax.Array:
    """Type `x` as no longer varying over `axes`, each of size 1; no data moves.

    Linear; the transpose is the cast to varying.
    """
    varying = varying_axes(x)
    sizes = axis_sizes(tuple(axis for axis in axes if axis in varying))
    assert all(size == 1 for size in sizes.values()), (
        f"drop_single: the axes {sizes} must be of size 1"
    )
    return agreed(x, sizes)


def agreed(x: jax.Array, axes: Iterable[str]) -> jax.Array:
    """Type `x` as no longer varying over `axes`, on whose ranks it is equal; no data moves.

    The caller vouches for the equality, which JAX cannot see. Linear; the transpose is the cast to
    varying.
    """
    varying = varying_axes(x)
    present = tuple(axis for axis in axes if axis in varying)
    return _agreed_p.bind(x, axes=present) if present else x


_agreed_p = Primitive("agreed")


def _agreed_type(aval: Any, *, axes: tuple[str, ...]) -> Any:
    return aval.update(manual_axis_type=aval.mat.update(varying=aval.mat.varying - set(axes)))


def _agreed_transpose(cotangent: Any, _: Any, *, axes: tuple[str, ...]) -> tuple[Any]:
    return (lax.pcast(cotangent, axes, to="varying"),)


_agreed_p.def_abstract_eval(_agreed_type)
mlir.register_lowering(_agreed_p, lambda context, x, *, axes: [x])
ad.deflinear2(_agreed_p, _agreed_transpose)
batching.defvectorized(_agreed_p)
