"""A layer's backward in two halves: the gradient of its input now, those of its weights later.

The backward is traced as one program and its equations are dealt out. Those that the gradient of
the input needs run first; the rest, for the most part one matrix product for each weight, runs when
there is time. Values that the second half needs from the first are *stashed*: the cotangents that
meet weights, and results of costly recomputation.

The stash is small. Gathers and cheap operations (element by element, sums) run again in the second
half where their operands take fewer bytes than their results; cheap ones run ahead in the first
where it is the other way round. So with sequence parallelism a cotangent is held as a rank's own
positions and gathered twice; of the gradient of a norm's scale, the sum over positions is held.

(Qi et al. 2024, "Zero Bubble Pipeline Parallelism", section 2.)
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax

from geojax.collectives.order import together_p
from geojax.models.chunk.equations import (
    Equation,
    flatten,
    needed_by,
    numbers_of,
    run,
    size_of,
    value_of,
)
from geojax.models.chunk.residuals import Residuals

_CHEAP = frozenset(
    (
        "add", "add_any", "and", "broadcast_in_dim", "concatenate", "convert_element_type", "copy",
        "cos", "div", "eq", "erf", "exp", "exp2", "expand_dims", "ge", "gt", "integer_pow", "iota",
        "le", "log", "logistic", "lt", "max", "min", "mul", "name", "ne", "neg", "not",
        "optimization_barrier", "or", "pcast", "pvary", "reduce_max", "reduce_precision",
        "reduce_sum", "reshape", "rsqrt", "select_n", "sign", "sin", "slice", "sqrt", "square",
        "squeeze", "stop_gradient", "sub", "tanh", "transpose",
    )
)  # fmt: skip
"""Primitives that may run in either half, or in both."""

_GATHERS = frozenset(("all_gather", "all_gather_invariant", "all_gather_reduced"))
"""Collectives that run again rather than have their results stashed."""


@dataclasses.dataclass(frozen=True, eq=False)
class SplitBackward:
    """The two halves of the backward of one function, for arguments of certain types."""

    input_steps: tuple[Equation, ...]
    weight_steps: tuple[Equation, ...]
    inputs: int
    """The number of values that the program begins with: residuals, `again`, cotangents."""
    residuals: int
    """The number of residuals."""
    stashed: tuple[int, ...]
    input_gradient_at: tuple[Any, ...]
    weight_gradients_at: tuple[Any, ...]
    input_structure: Any
    weight_structure: Any

    @classmethod
    def of(cls, residuals: Residuals, again: Any, cotangents: Any) -> "SplitBackward":
        """Split the backward of `forward(f, weights, x, again=again)` of `geojax.models.chunk`.

        Args:
            residuals: of the forward: arrays, or tracers of their types.
            again: as `Residuals.backward` takes it.
            cotangents: of the function's outputs.
        """

        def backward(saved: list[Any], again: Any, cotangents: Any) -> tuple[Any, Any]:
            weights, x = dataclasses.replace(residuals, saved=saved).backward(cotangents, again)
            return weights, x

        arguments = (residuals.saved, again, cotangents)
        closed, shapes = jax.make_jaxpr(backward, return_shape=True)(*arguments)
        first_cotangent = len(jax.tree.leaves(arguments[:2]))
        steps, outputs, inputs = flatten(closed, without=together_p)
        weights, x = (jax.tree.structure(tree) for tree in shapes)
        count = len(jax.tree.leaves(shapes[0]))
        at_weights, at_x = outputs[:count], outputs[count:]
        maker = {number: step for step in steps for number in step.results}
        saved = range(len(jax.tree.leaves(residuals.saved)))
        cotangents_at = range(first_cotangent, inputs)
        sizes = [size_of(variable.aval) for variable in closed.jaxpr.invars]
        needed = _least_stash(steps, sizes, saved, cotangents_at, needed_by(at_x, maker))
        stashed: set[int] = set().union(*(needed[number] for number in numbers_of(at_weights)))
        second = needed_by(at_weights, {n: maker[n] for n in maker if n not in stashed})
        first = needed_by([*at_x, *stashed], maker)
        return cls(
            tuple(step for step in steps if step in first),
            tuple(step for step in steps if step in second),
            inputs,
            len(saved),
            tuple(sorted(stashed)),
            tuple(at_x),
            tuple(at_weights),
            x,
            weights,
        )

    @property
    def residuals_read_later(self) -> frozenset[int]:
        """The positions of the residuals that the second half reads."""
        read = {number for step in self.weight_steps for number in numbers_of(step.operands)}
        read |= {*numbers_of(self.weight_gradients_at)}
        return frozenset(read & set(range(self.residuals)))

    def input_gradient(
        self, residuals: Residuals, again: Any, cotangents: Any
    ) -> tuple[Any, "Stash"]:
        """Compute the gradient of the input, and the stash for those of the weights."""
        values = dict(enumerate(jax.tree.leaves((residuals, again, cotangents))))
        assert len(values) == self.inputs, "arguments must be those for which it was split"
        run(self.input_steps, values)
        gradient = [value_of(each, values) for each in self.input_gradient_at]
        stashed = Stash([values[number] for number in self.stashed], self)
        return jax.tree.unflatten(self.input_structure, gradient), stashed


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Stash:
    """The values that the first half of a split backward leaves for the second; a pytree."""

    values: list[jax.Array]
    split: SplitBackward = dataclasses.field(metadata={"static": True})

    def weight_gradients(self, residuals: Residuals, again: Any) -> Any:
        """Compute the gradients of the weights; arguments as `SplitBackward.input_gradient`."""
        values = dict(enumerate(jax.tree.leaves((residuals, again))))
        values |= dict(zip(self.split.stashed, self.values, strict=True))
        run(self.split.weight_steps, values)
        gradients = [value_of(each, values) for each in self.split.weight_gradients_at]
        return jax.tree.unflatten(self.split.weight_structure, gradients)


def _least_stash(
    steps: Sequence[Equation],
    sizes: Sequence[int],
    saved: range,
    cotangents: range,
    for_input: set[Equation],
) -> dict[int, frozenset[int]]:
    """Find for each value what the second half must be handed to have it, in the fewest bytes.

    It is the value itself, or what its operands need. Values that do not depend on the microbatch
    need nothing: a slice's index, say, is the same on every stage, and is available again.

    Args:
        steps: of the whole backward, in their order.
        sizes: the bytes of each of its inputs.
        saved: the inputs that are residuals.
        cotangents: the inputs that only the first half is given.
        for_input: the steps that the gradient of the input needs.
    """
    bytes_of = dict(enumerate(sizes))
    needed = {n: frozenset([n] if n in cotangents else []) for n in range(len(sizes))}
    in_first_half, of_microbatch = set(needed), {*saved, *cotangents}
    for step in steps:
        bytes_of.update(zip(step.results, step.sizes, strict=True))
        operands = set(numbers_of(step.operands))
        handed = frozenset[int]().union(*(needed[number] for number in operands))
        constant = of_microbatch.isdisjoint(operands)
        cheap = step.primitive.name in _CHEAP
        first = constant or step in for_input or (cheap and operands <= in_first_half)
        again = constant or step not in for_input or cheap or step.primitive.name in _GATHERS
        of_operands = sum(bytes_of[number] for number in handed)
        for number in step.results:
            itself = first and (not again or bytes_of[number] < of_operands)
            needed[number] = frozenset([number]) if itself else handed
        if first:
            in_first_half.update(step.results)
        if not constant:
            of_microbatch.update(step.results)
    return needed
