"""A traced program as a list of equations, which may be dealt out and run in another order."""

import contextlib
import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any

import jax
from jax.extend import core

_CALLS = frozenset(
    ("jit", "pjit", "closed_call", "core_call", "remat", "remat2", "checkpoint", "custom_jvp_call")
)
"""Primitives that do nothing but run a program."""


@dataclasses.dataclass(frozen=True, eq=False)
class Equation:
    """An equation; its operands and results by number, other operands as `Constant`s."""

    primitive: Any
    parameters: dict[str, Any]
    context: Any
    scope: str
    """The names of its scopes (`jax.named_scope`), inside those in which it is run."""
    operands: tuple[Any, ...]
    results: tuple[int, ...]
    sizes: tuple[int, ...]
    """The bytes of each result."""


@dataclasses.dataclass(frozen=True, eq=False)
class Constant:
    """An operand that is no result of an equation and no input."""

    value: Any


def flatten(
    closed: core.ClosedJaxpr, *, without: Any = None
) -> tuple[list[Equation], list[Any], int]:
    """Inline all calls of a program: its equations, its outputs, and its number of inputs.

    Values are numbered, the inputs first. Equations of the primitive `without`, whose results are
    its operands, are left out.
    """
    equations: list[Equation] = []
    inputs = len(closed.jaxpr.invars)
    count = inputs

    def append(
        jaxpr: Any, constants: Sequence[Any], operands: Sequence[Any], outer: tuple[str, ...] = ()
    ) -> list[Any]:
        nonlocal count
        names = dict(zip(jaxpr.invars, operands, strict=True))
        names |= zip(jaxpr.constvars, map(Constant, constants), strict=True)

        def read(variable: Any) -> Any:
            literal = isinstance(variable, core.Literal)
            return Constant(variable.val) if literal else names[variable]

        for equation in jaxpr.eqns:
            operands = [read(variable) for variable in equation.invars]
            if equation.primitive is without:
                names |= zip(equation.outvars, operands, strict=True)
                continue
            scopes = (*outer, str(equation.source_info.name_stack))
            called = _called(equation)
            if called is not None:
                made = append(*called, operands, scopes)
                names |= zip(equation.outvars, made, strict=True)
                continue
            results = tuple(range(count, count + len(equation.outvars)))
            count += len(results)
            names |= zip(equation.outvars, results, strict=True)
            scope = "/".join(filter(None, scopes))
            what = (equation.primitive, equation.params, equation.ctx, scope)
            sizes = tuple(size_of(variable.aval) for variable in equation.outvars)
            equations.append(Equation(*what, tuple(operands), results, sizes))
        return [read(variable) for variable in jaxpr.outvars]

    outputs = append(closed.jaxpr, closed.consts, range(inputs))
    return equations, outputs, inputs


def _called(equation: Any) -> tuple[Any, Sequence[Any]] | None:
    """Return the program that an equation only runs, and its constants."""
    if equation.primitive.name not in _CALLS:
        return None
    called = next(equation.params[key] for key in ("jaxpr", "call_jaxpr") if key in equation.params)
    return getattr(called, "jaxpr", called), getattr(called, "consts", ())


def needed_by(outputs: Sequence[Any], maker: dict[int, Equation]) -> set[Equation]:
    """Return the equations that `outputs` need; `maker` has the equation of each number."""
    needed: set[Equation] = set()
    wanted = numbers_of(outputs)
    while wanted:
        equation = maker.get(wanted.pop())
        if equation is not None and equation not in needed:
            needed.add(equation)
            wanted += numbers_of(equation.operands)
    return needed


def numbers_of(operands: Iterable[Any]) -> list[int]:
    """Return the operands that are no constants."""
    return [operand for operand in operands if isinstance(operand, int)]


def size_of(aval: Any) -> int:
    """Return the bytes of a value."""
    size: int = math.prod(aval.shape)
    itemsize: int = getattr(aval.dtype, "itemsize", 0)
    return size * itemsize


def run(equations: Iterable[Equation], values: dict[int, Any]) -> None:
    """Run equations on `values` by number, and add their results to these."""
    for equation in equations:
        parameters = equation.primitive.get_bind_params(equation.parameters)
        operands = [value_of(each, values) for each in equation.operands]
        scope = jax.named_scope(equation.scope) if equation.scope else contextlib.nullcontext()
        with equation.context.manager, scope:
            made = equation.primitive.bind(*operands, **parameters)
        made = made if equation.primitive.multiple_results else [made]
        values.update(zip(equation.results, made, strict=True))


def value_of(operand: Any, values: dict[int, Any]) -> Any:
    """Return the value of an operand."""
    return operand.value if isinstance(operand, Constant) else values[operand]
