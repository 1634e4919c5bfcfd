"""A function forwards and backwards as two calls, with explicit residuals between them.

`jax.vjp` gives a closure that holds, besides intermediate results, the very inputs that the
backward needs: weights, masks, tables. Stacked over layers or put into a buffer of microbatches,
they would be copied once more for each. `Residuals` holds the intermediate results alone; inputs
that are at hand again when the backward runs are given to it again.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from jax.core import Tracer


@dataclasses.dataclass(frozen=True, eq=False)
class _Rebuild:
    """The recipe to make the closure of `jax.vjp` again; one object for all layers of a scan."""

    structure: Any
    """The pytree structure of the closure."""

    origins: tuple[tuple[str, int], ...]
    """The source of each leaf of the closure, and its position there."""

    constants: tuple[Any, ...]
    """Leaves that are known when the program is built."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Residuals:
    """The intermediate results that the forward of a function keeps for its backward.

    A pytree of the arrays that have to be kept; `lax.scan` stacks and slices it as any other.
    """

    saved: list[jax.Array]
    rebuild: _Rebuild = dataclasses.field(metadata={"static": True})

    def backward(self, cotangents: Any, again: Any) -> Any:
        """Compute the cotangents of `forward`'s differentiable arguments.

        Args:
            cotangents: of the outputs, in their structure and types.
            again: the `again` of `forward`, in the same structure.
        """
        sources = {
            "saved": self.saved,
            "again": jax.tree.leaves(again),
            "constant": self.rebuild.constants,
        }
        leaves = [sources[source][position] for source, position in self.rebuild.origins]
        return jax.tree.unflatten(self.rebuild.structure, leaves)(cotangents)


def forward(function: Callable[..., Any], *arguments: Any, again: Any) -> tuple[Any, Residuals]:
    """Compute `function(*arguments)` and the residuals for its backward.

    Args:
        function: differentiable in all of `arguments`. What else it reads is closed over.
        arguments: pytrees of arrays.
        again: a pytree of arrays, among them arguments or what `function` closes over, that will
            be given to `Residuals.backward` once more and so are not kept.
    """
    outputs, closure = jax.vjp(function, *arguments)
    leaves, structure = jax.tree.flatten(closure)
    position_again = {id(leaf): index for index, leaf in enumerate(jax.tree.leaves(again))}
    position_saved: dict[int, int] = {}
    saved: list[jax.Array] = []
    constants: list[Any] = []
    origins = []
    for leaf in leaves:
        if id(leaf) in position_again:
            origins.append(("again", position_again[id(leaf)]))
        elif not isinstance(leaf, Tracer):
            origins.append(("constant", len(constants)))
            constants.append(leaf)
        else:
            if id(leaf) not in position_saved:  # a closure may hold a result more than once
                position_saved[id(leaf)] = len(saved)
                saved.append(leaf)
            origins.append(("saved", position_saved[id(leaf)]))
    return outputs, Residuals(saved, _Rebuild(structure, tuple(origins), tuple(constants)))
