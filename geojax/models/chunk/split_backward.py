"""A layer's backward in two halves: the gradient of its input now, those of its weights later.

The backward is traced as one program and its equations are dealt out. Those that the gradient of
the input needs run first; the rest, for the most part one matrix product for each weight, runs when
there is time. Values that the second half needs from the first are *stashed*: the cotangents that
meet weights, and results of costly recomputation; cheap ones (element by element, from residuals)
are computed again.

(Qi et al. 2024, "Zero Bubble Pipeline Parallelism", section 2.)
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
from jax.extend import core

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
        "optimization_barrier", "or", "pcast", "pvary", "reduce_max", "reduce_sum", "reshape",
        "rsqrt", "select_n", "sign", "sin", "slice", "sqrt", "square", "squeeze", "stop_gradient",
        "sub", "tanh", "transpose",
    )
)  # fmt: skip
"""Primitives that are computed again rather than stashed."""

_FREE = frozenset(
    ("copy", "expand_dims", "name", "pcast", "pvary", "reshape", "squeeze", "transpose")
)
"""Primitives whose operand is stashed instead: it may be stashed already."""


@dataclasses.dataclass(frozen=True, eq=False)
class _Step:
    """An equation; its operands and results by number, other operands as they are."""

    primitive: Any
    parameters: dict[str, Any]
    context: Any
    operands: tuple[Any, ...]
    results: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class _Constant:
    value: Any


@dataclasses.dataclass(frozen=True, eq=False)
class SplitBackward:
    """The two halves of the backward of one function, for arguments of certain types."""

    input_steps: tuple[_Step, ...]
    weight_steps: tuple[_Step, ...]
    inputs: int
    """The number of values that the program begins with: residuals, `again`, cotangents."""
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
        for_input = _needed(at_x, maker)
        saved = range(len(jax.tree.leaves(residuals.saved)))
        not_recomputed = _not_recomputed(steps, saved, range(first_cotangent, inputs))
        weight_steps: set[_Step] = set()
        stashed: dict[int, None] = {}
        wanted = [number for number in at_weights if isinstance(number, int)]
        while wanted:
            number = wanted.pop()
            step = maker.get(number)
            if step is None:
                if number >= first_cotangent:
                    stashed[number] = None
            elif (
                step in for_input and number in not_recomputed and step.primitive.name not in _FREE
            ):
                stashed[number] = None
            elif step not in weight_steps:
                weight_steps.add(step)
                wanted += [operand for operand in step.operands if isinstance(operand, int)]
        return cls(
            tuple(step for step in steps if step in for_input),
            tuple(step for step in steps if step in weight_steps),
            inputs,
            tuple(sorted(stashed)),
            tuple(at_x),
            tuple(at_weights),
            x,
            weights,
        )

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


def _flatten(closed: core.ClosedJaxpr) -> tuple[list[_Step], list[Any], int]:
    """Inline all calls of a program: its steps, its outputs, and its number of inputs.

    Values are numbered, the inputs first.
    """
    steps: list[_Step] = []
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
            steps.append(_Step(*what, tuple(operands), results))
        return [read(variable) for variable in jaxpr.outvars]

    outputs = append(closed.jaxpr, closed.consts, range(inputs))
    return steps, outputs, inputs


def _called(equation: Any) -> tuple[Any, Sequence[Any]] | None:
    """Return the program that an equation only runs, and its constants."""
    if equation.primitive.name not in _CALLS:
        return None
    called = next(equation.params[key] for key in ("jaxpr", "call_jaxpr") if key in equation.params)
    return getattr(called, "jaxpr", called), getattr(called, "consts", ())


def _needed(outputs: Sequence[Any], maker: dict[int, _Step]) -> set[_Step]:
    needed: set[_Step] = set()
    wanted = [number for number in outputs if isinstance(number, int)]
    while wanted:
        step = maker.get(wanted.pop())
        if step is not None and step not in needed:
            needed.add(step)
            wanted += [operand for operand in step.operands if isinstance(operand, int)]
    return needed


def _not_recomputed(steps: Sequence[_Step], saved: range, cotangents: range) -> set[int]:
    """Find the values that depend on a cotangent, or are costly to compute again.

    Values that do not depend on the microbatch are left out: a slice's index, say, is the same on
    every stage, and is available again.
    """
    not_recomputed, of_microbatch = set(cotangents), {*saved, *cotangents}
    for step in steps:
        numbers = {operand for operand in step.operands if isinstance(operand, int)}
        if of_microbatch.isdisjoint(numbers):
            continue
        of_microbatch.update(step.results)
        if step.primitive.name not in _CHEAP or not not_recomputed.isdisjoint(numbers):
            not_recomputed.update(step.results)
    return not_recomputed


def _run(steps: Sequence[_Step], values: dict[int, Any]) -> None:
    for step in steps:
        parameters = step.primitive.get_bind_params(step.parameters)
        operands = [_value(each, values) for each in step.operands]
        with step.context.manager:
            made = step.primitive.bind(*operands, **parameters)
        made = made if step.primitive.multiple_results else [made]
        values.update(zip(step.results, made, strict=True))


def _value(operand: Any, values: dict[int, Any]) -> Any:
    return operand.value if isinstance(operand, _Constant) else values[operand]
