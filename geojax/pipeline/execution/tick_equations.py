"""The equations of a tick's passes, which may run in another order.

The traced program says with primitives that return their operands what begins when others are
there (`ORDERS`).
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import jax

from geojax.collectives.order import barrier_p, together_p
from geojax.models.chunk.equations import Equation, flatten, needed_by, value_of

State = TypeVar("State")
Made = TypeVar("Made")

Passes = Callable[[State], tuple[State, Made]]
"""Function from the state before a tick's passes to that behind them, and to the streams that they
made: the cotangent first."""

ORDERS = (together_p, barrier_p)
"""Primitives whose results are their operands, when all of these are there."""


@dataclasses.dataclass(frozen=True)
class TickEquations:
    """The traced passes of a tick."""

    equations: list[Equation]
    state: list[jax.Array]
    """The arrays of the state before the passes, which have the first numbers."""
    outputs: list[Any]
    """The operands that are the state behind the passes, and their streams."""
    structure: Any
    streams: list[Any]
    """The operands that are sent, the cotangent first."""
    fresh: Iterator[int]
    """Numbers that no equation has."""

    @classmethod
    def of(cls, passes: Passes[State, Made], state: State) -> "TickEquations":
        """Trace the passes."""
        closed, shapes = jax.make_jaxpr(passes, return_shape=True)(state)
        equations, outputs, inputs = flatten(closed)
        streams = outputs[-len(jax.tree.leaves(shapes[1])) :]
        taken = [number for each in equations for number in each.results]
        fresh = itertools.count(1 + max([inputs, *taken]))
        structure = jax.tree.structure(shapes)
        return cls(equations, jax.tree.leaves(state), outputs, structure, streams, fresh)

    @functools.cached_property
    def maker(self) -> dict[int, Equation]:
        """The equation of each number; of `ORDERS`, of one operand."""
        maker = {number: each for each in self.equations for number in each.results}
        for each in self.equations:
            if each.primitive in ORDERS:
                maker |= {
                    number: part_of(each, [place]) for place, number in enumerate(each.results)
                }
        return maker

    @functools.cached_property
    def needed(self) -> set[Equation]:
        """The equations that the streams need: none is a product of a weight's gradient."""
        return needed_by(self.streams, self.maker)

    def results(self, values: dict[int, Any]) -> Any:
        """Return what the passes return, of all values by number."""
        return jax.tree.unflatten(self.structure, [value_of(each, values) for each in self.outputs])


def part_of(equation: Equation, places: Sequence[int]) -> Equation:
    """Return an equation of `ORDERS` of some of its operands."""

    def chosen(of_all: Sequence[Any]) -> tuple[Any, ...]:
        return tuple(of_all[place] for place in places)

    return dataclasses.replace(
        equation,
        operands=chosen(equation.operands),
        results=chosen(equation.results),
        sizes=chosen(equation.sizes),
    )


def identity_of(
    equation: Equation, primitive: Any, operands: Sequence[int], result: int
) -> Equation:
    """Return an equation of a primitive without parameters, in the scope of another."""
    return dataclasses.replace(
        equation, primitive=primitive, parameters={}, operands=tuple(operands), results=(result,)
    )


def is_product(equation: Equation) -> bool:
    """Return True if the equation is a matrix product."""
    name: str = equation.primitive.name
    return name == "dot_general"
