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
import math
from collections.abc import Iterable, Sequence
from typing import Any

import jax
from jax.extend import core

from geojax.collectives.order import together_p
from geojax.models.chunk.residuals import Residuals

_CALLS = frozenset(
    ("jit", "pjit", "closed_call", "core_call", "remat", "remat2", "checkpoint", "custom_jvp_call")
)
"""Primitives that do nothing but run a program."""

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
class _Equation:
    """An equation; its operands and results by number, other operands as they are."""

    primitive: Any
    parameters: dict[str, Any]
    context: Any
    operands: tuple[Any, ...]
    results: tuple[int, ...]
    sizes: tuple[int, ...]
    """The bytes of each result."""


@dataclasses.dataclass(frozen=True)
class _Constant:
    value: Any


@dataclasses.dataclass(frozen=True, eq=False)
class SplitBackward:
    """The two halves of the backward of one function, for arguments of certain types."""

    input_steps: tuple[_Equation, ...]
    weight_steps: tuple[_Equation, ...]
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
        steps, outputs, inputs = _flatten(closed)
        weights, x = (jax.tree.structure(tree) for tree in shapes)
        count = len(jax.tree.leaves(shapes[0]))
        at_weights, at_x = outputs[:count], outputs[count:]
        maker = {number: step for step in steps for number in step.results}
        saved = range(len(jax.tree.leaves(residuals.saved)))
        cotangents_at = range(first_cotangent, inputs)
        sizes = [_bytes(variable.aval) for variable in closed.jaxpr.invars]
        needed = _least_stash(steps, sizes, saved, cotangents_at, _needed(at_x, maker))
        stashed: set[int] = set().union(*(needed[number] for number in _numbers(at_weights)))
        second = _needed(at_weights, {n: maker[n] for n in maker if n not in stashed})
        first = _needed([*at_x, *stashed], maker)
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
        read = {number for step in self.weight_steps for number in _numbers(step.operands)}
        read |= {*_numbers(self.weight_gradients_at)}
        return frozenset(read & set(range(self.residuals)))

    def input_gradient(
        self, residuals: Residuals, again: Any, cotangents: Any
    ) -> tuple[Any, "Stash"]:
        """Compute the gradient of the input, and the stash for those of the weights."""
        values = dict(enumerate(jax.tree.leaves((residuals, again, cotangents))))
        assert len(values) == self.inputs, "arguments must be those for which it was split"
        _run(self.input_steps, values)
        gradient = [_value(each, values) for each in self.input_gradient_at]
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
        _run(self.split.weight_steps, values)
        gradients = [_value(each, values) for each in self.split.weight_gradients_at]
        return jax.tree.unflatten(self.split.weight_structure, gradients)


def _flatten(closed: core.ClosedJaxpr) -> tuple[list[_Equation], list[Any], int]:
    """Inline all calls of a program: its steps, its outputs, and its number of inputs.

    Values are numbered, the inputs first.
    """
    steps: list[_Equation] = []
    inputs = len(closed.jaxpr.invars)
    count = inputs

    def append(jaxpr: Any, constants: Sequence[Any], operands: Sequence[Any]) -> list[Any]:
        nonlocal count
        names = dict(zip(jaxpr.invars, operands, strict=True))
        names |= zip(jaxpr.constvars, map(_Constant, constants), strict=True)

        def read(variable: Any) -> Any:
            literal = isinstance(variable, core.Literal)
            return _Constant(variable.val) if literal else names[variable]

        for equation in jaxpr.eqns:
            operands = [read(variable) for variable in equation.invars]
            if equation.primitive is together_p:  # the two halves are not
                names |= zip(equation.outvars, operands, strict=True)
                continue
            called = _called(equation)
            if called is not None:
                inner, inner_constants = called
                names |= zip(
                    equation.outvars, append(inner, inner_constants, operands), strict=True
                )
                continue
            results = tuple(range(count, count + len(equation.outvars)))
            count += len(results)
            names |= zip(equation.outvars, results, strict=True)
            what = (equation.primitive, equation.params, equation.ctx)
            sizes = tuple(_bytes(variable.aval) for variable in equation.outvars)
            steps.append(_Equation(*what, tuple(operands), results, sizes))
        return [read(variable) for variable in jaxpr.outvars]

    outputs = append(closed.jaxpr, closed.consts, range(inputs))
    return steps, outputs, inputs


def _called(equation: Any) -> tuple[Any, Sequence[Any]] | None:
    """Return the program that an equation only runs, and its constants."""
    if equation.primitive.name not in _CALLS:
        return None
    called = next(equation.params[key] for key in ("jaxpr", "call_jaxpr") if key in equation.params)
    return getattr(called, "jaxpr", called), getattr(called, "consts", ())


def _needed(outputs: Sequence[Any], maker: dict[int, _Equation]) -> set[_Equation]:
    needed: set[_Equation] = set()
    wanted = _numbers(outputs)
    while wanted:
        step = maker.get(wanted.pop())
        if step is not None and step not in needed:
            needed.add(step)
            wanted += _numbers(step.operands)
    return needed


def _least_stash(
    steps: Sequence[_Equation],
    sizes: Sequence[int],
    saved: range,
    cotangents: range,
    for_input: set[_Equation],
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
        operands = set(_numbers(step.operands))
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


def _numbers(operands: Iterable[Any]) -> list[int]:
    """Return the operands that are no constants."""
    return [operand for operand in operands if isinstance(operand, int)]


def _bytes(aval: Any) -> int:
    size: int = math.prod(aval.shape)
    itemsize: int = getattr(aval.dtype, "itemsize", 0)
    return size * itemsize


def _run(steps: Sequence[_Equation], values: dict[int, Any]) -> None:
    for step in steps:
        parameters = step.primitive.get_bind_params(step.parameters)
        operands = [_value(each, values) for each in step.operands]
        with step.context.manager:
            made = step.primitive.bind(*operands, **parameters)
        made = made if step.primitive.multiple_results else [made]
        values.update(zip(step.results, made, strict=True))


def _value(operand: Any, values: dict[int, Any]) -> Any:
    return operand.value if isinstance(operand, _Constant) else values[operand]
