"""Declarations of parameters: what belongs to each stands where its module makes it.

A module of the model is a `flax.nnx.Module` that makes its parameters by `parameter`, of a shape
alone: no device is touched. The facts become metadata of the `nnx.Param`, and everything that needs
them (initial values, sharding, FP8) reads them off `declared`.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
from flax import nnx

Parameters = dict[str, Any]
"""Nested dict of arrays (or of their shapes, or of anything else leaf by leaf)."""

Kind: TypeAlias = Literal["matrix", "table", "vector", "adapter"]
"""Parameters as an optimizer tells them apart: matrices of layers; tables and the head's matrix;
scales, biases and sinks; and halves of adapters."""

KindOf: TypeAlias = Callable[[str], Kind]
"""The kind of a parameter by its dotted name."""

Initial: TypeAlias = Callable[[jax.Array, tuple[int, ...]], jax.Array]
"""Draws initial values from a key and a shape, in float32."""


# Equal ones are one object, so that modules which declare the same are equal.
@functools.lru_cache(maxsize=256)
def normal(deviation: float) -> Initial:
    """Return the normal distribution around 0 with this standard deviation."""
    return lambda key, shape: deviation * jax.random.normal(key, shape, jnp.float32)


@functools.lru_cache(maxsize=256)
def constant(value: float) -> Initial:
    """Return the distribution that is one value."""
    return lambda key, shape: jnp.full(shape, value, jnp.float32)


@dataclasses.dataclass(frozen=True)
class Declaration:
    """A parameter and what belongs to it."""

    shape: tuple[int, ...]

    initial: Initial = dataclasses.field(default=constant(0.0), compare=False)
    """Initial values of it, or of all its layers at once."""

    axes: tuple[str | None, ...] = ()
    """Mesh axis that shards each dim, in a layout that has it; dims behind these have none.
    "vocabulary" stands for the axes whose ranks share the vocabulary."""

    heads: int | None = None
    """Heads of keys and values that the last dim holds; None: others. Where `tensor` has more
    ranks, each has all of the parameter, and slices the head that its queries read."""

    in_parts: bool = False
    """True if a rank of `tensor` that holds all of the parameter computes a part of its gradient,
    also where ranks do not share the sequence."""

    kind: Kind | None = None
    """Kind of parameter, for the optimizer. None: its name says it (`kind_by_name`)."""

    fp8: bool = False
    """True if a layer with an FP8 recipe multiplies by it in FP8."""

    is_wide: bool = False
    """True if it is computed with in at least float32, whatever the compute dtype."""

    @classmethod
    def of(cls, parameter: nnx.Param) -> "Declaration":
        """Read what belongs to a parameter; one that no `parameter` made may say nothing."""
        told = parameter.get_metadata()
        facts = [field.name for field in dataclasses.fields(cls) if field.name in told]
        return cls(parameter.get_value().shape, **{name: told[name] for name in facts})


def parameter(
    shape: tuple[int, ...], initial: Initial, *, kind: Kind = "vector", **facts: Any
) -> nnx.Param:
    """Declare a parameter by a shape, its initial values and other fields of `Declaration`."""
    value = jax.ShapeDtypeStruct(shape, jnp.float32)
    made: nnx.Param = nnx.Param(value, initial=initial, kind=kind, **facts)
    return made


def kind_by_name(name: str) -> Kind:
    """Return the kind of a parameter that declares none, by its dotted name, as Flax gives names.

    Flax calls a matrix "kernel" and a table "embedding".
    """
    *above, last = name.split(".")
    if last == "embedding":
        return "table"
    if last == "kernel":
        return "matrix" if "layers" in above[:1] else "table"
    return "vector"


def declared(module: nnx.Module) -> Parameters:
    """Return the `Declaration` of each parameter of a module, in a tree by its attributes."""
    parameters = nnx.state(module, nnx.Param)
    return nnx.to_pure_dict(parameters, extract_fn=Declaration.of)


def stacked(tree: Parameters, count: int) -> Parameters:
    """Declare `count` layers alike, on a leading dim of each parameter."""

    def stack(leaf: Declaration) -> Declaration:
        return dataclasses.replace(leaf, shape=(count, *leaf.shape), axes=(None, *leaf.axes))

    return jax.tree.map(stack, tree)
