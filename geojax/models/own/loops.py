"""Loops of anybody's code inside a `shard_map`: what they carry varies where their inputs do.

A `shard_map` types each value by the mesh axes over which it varies, and a loop must carry one
type. Code that knows of no mesh begins with zeros, which vary over none, and goes on with numbers
of its sequences, which do. Here such code is traced alone, and its loops begin with varying values.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax
from jax.extend import core

from geojax.collectives.axes import vary_over, varying_axes


def with_varying_loops(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that computes the same, whose loops may begin with any value.

    `function` must be of arrays alone, close over none, and call no collective.
    """

    @functools.wraps(function)
    def call(*arguments: Any) -> Any:
        flat, structure = jax.tree.flatten(arguments)
        shapes = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in flat]
        traced, made = jax.make_jaxpr(
            lambda *leaves: function(*jax.tree.unflatten(structure, leaves)), return_shape=True
        )(*shapes)
        return jax.tree.unflatten(jax.tree.structure(made), _run(traced, flat))

    return call


def _run(program: core.ClosedJaxpr, arguments: Sequence[Any]) -> list[Any]:
    """Run a traced program."""
    jaxpr = program.jaxpr
    values = dict(zip(jaxpr.constvars, program.consts, strict=True))
    values |= dict(zip(jaxpr.invars, arguments, strict=True))

    def read(variable: Any) -> Any:
        return variable.val if isinstance(variable, core.Literal) else values[variable]

    for equation in jaxpr.eqns:
        inputs = [read(each) for each in equation.invars]
        with equation.ctx.manager:
            outputs = _results(equation, inputs)
        values |= dict(zip(equation.outvars, outputs, strict=True))
    return [read(each) for each in jaxpr.outvars]


def _results(equation: core.JaxprEqn, inputs: list[Any]) -> Sequence[Any]:
    """Compute the results of one operation."""
    parameters = equation.params
    match equation.primitive.name:
        case "scan":
            return _scan(parameters, inputs)
        case "cond":
            branches = [
                functools.partial(_varying, inputs, each) for each in parameters["branches"]
            ]
            return lax.switch(inputs[0], branches, *inputs[1:])
        case "pjit" | "jit":
            return _run(parameters["jaxpr"], inputs)
        case "remat2" | "checkpoint":
            inner = core.ClosedJaxpr(parameters["jaxpr"], ())
            policy = {name: parameters[name] for name in ("policy", "prevent_cse")}
            return jax.checkpoint(functools.partial(_run, inner), **policy)(inputs)
    others = equation.primitive.get_bind_params(parameters)
    results = equation.primitive.bind(*_vary(inputs, inputs), **others)
    return results if equation.primitive.multiple_results else [results]


def _varying(inputs: Sequence[Any], program: core.ClosedJaxpr, *arguments: Any) -> list[Any]:
    """Run a program; its results vary where any of `inputs` does."""
    return _vary(_run(program, arguments), inputs)


def _vary(values: Sequence[Any], inputs: Sequence[Any]) -> list[Any]:
    axes = varying_axes(*inputs)
    return [vary_over(each, axes) for each in values]


def _scan(parameters: dict[str, Any], inputs: list[Any]) -> list[Any]:
    count, carried = _sizes(parameters)
    constants, start, scanned = (
        inputs[:count],
        inputs[count : count + carried],
        inputs[count + carried :],
    )

    def body(carry: list[Any], each: list[Any]) -> tuple[list[Any], list[Any]]:
        made = _run(parameters["jaxpr"], [*constants, *carry, *each])
        return _vary(made[:carried], inputs), made[carried:]

    last, stacked = lax.scan(
        body,
        _vary(start, inputs),
        scanned,
        length=parameters["length"],
        reverse=parameters["reverse"],
        unroll=parameters["unroll"],
    )
    return [*last, *stacked]


def _sizes(parameters: dict[str, Any]) -> tuple[int, int]:
    """Return the numbers of a scan's constants and of what it carries."""
    if "ft_in" in parameters:  # since JAX 0.12
        constants, carry, _ = parameters["ft_in"].unpack()
        return len(constants), len(carry)
    return parameters["num_consts"], parameters["num_carry"]
