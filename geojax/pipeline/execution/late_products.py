"""Products of weights' gradients that wait for a tick's streams, which then travel beside them.

A tick ends with the streams that it sends, and nothing is left to compute beside their hops. The
gradients of the weights that a layer multiplies its input by can wait: they read the cotangents
that the last products of the input's own cotangent read, and nothing in the tick reads them.

    a tick   .. last products ─► scatter ─► cotangent ─► hop ─►
                                            late products ─► sums
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax

from geojax.collectives import barrier, token_of
from geojax.collectives.order import barrier_p, held_until, together_p
from geojax.models.chunk.equations import (
    Constant,
    Equation,
    flatten,
    needed_by,
    numbers_of,
    run,
    value_of,
)

State = TypeVar("State")

_ORDERS = (together_p, barrier_p)
"""Primitives whose results are their operands, when all of these are there."""


def with_late_products(
    passes: Callable[[State], tuple[State, dict[str, jax.Array]]], state: State
) -> tuple[State, dict[str, jax.Array], list[jax.Array]]:
    """Return the results of `passes(state)`, and the gradients that wait for its streams.

    Args:
        passes: a forward and a backward; returns the state behind them, and their streams: the
            cotangent as "B" and "F".
        state: a pytree of arrays.
    """
    closed, shapes = jax.make_jaxpr(passes, return_shape=True)(state)
    equations, outputs, _ = flatten(closed)
    structure, streams = jax.tree.structure(shapes), outputs[-len(shapes[1]) :]
    last, late = _last_and_late(equations, streams)
    if not late:
        return *passes(state), []
    now, behind = _dealt_out(equations, late)
    values = dict(enumerate(jax.tree.leaves(state)))
    maker = {number: each for each in now for number in each.results}
    read_by_last = {number for each in last for number in numbers_of(each.operands)}
    read_by_late = {number for each in late for number in numbers_of(each.operands)}
    cotangents = read_by_last & read_by_late

    def held(equation: Equation, token: jax.Array) -> Equation:
        operands = [
            Constant(held_until(values[each], token)) if each in cotangents else each
            for each in equation.operands
        ]
        return dataclasses.replace(equation, operands=tuple(operands))

    # XLA would gather what only late products read when these begin, beside nothing.
    others = sorted(maker.keys() & read_by_late - cotangents)
    before = needed_by(others, maker)
    run([each for each in now if each in before], values)
    token = token_of([values[each] for each in others]) if others else None
    for each in now:
        if each not in before:
            run([each if token is None or each not in last else held(each, token)], values)
    # XLA would compute a number of a stream apart, before the stream.
    sent = barrier([values[each] for each in streams])
    values.update(zip(streams, sent, strict=True))
    token = token_of(sent)
    for each in behind:
        if each.primitive in _ORDERS:  # nothing may stand between a product and its sum
            values[each.results[0]] = values[each.operands[0]]
        else:
            run([held(each, token) if each in late else each], values)
    made: tuple[State, dict[str, jax.Array]] = jax.tree.unflatten(
        structure, [value_of(each, values) for each in outputs]
    )
    products = {number for each in late for number in each.results}
    readers = [each for each in behind if products.intersection(numbers_of(each.operands))]
    return *made, [values[number] for each in readers for number in each.results]


def _last_and_late(
    equations: list[Equation], streams: list[Any]
) -> tuple[set[Equation], list[Equation]]:
    """Return the last products of the cotangent, the first of `streams`, and those that can wait.

    A last product is one that no other separates from the cotangent, and that waits for none of
    these.
    """
    maker = {number: each for each in equations for number in each.results}
    for each in equations:
        if each.primitive in _ORDERS:
            maker |= {number: _part(each, [place]) for place, number in enumerate(each.results)}
    found, seen, wanted = set[Equation](), set[Equation](), numbers_of(streams[:1])
    while wanted:
        made_by = maker.get(wanted.pop())
        if made_by is not None and made_by not in seen:
            seen.add(made_by)
            if _is_product(made_by):
                found.add(made_by)
            else:
                wanted += numbers_of(made_by.operands)
    waited_for = set[Equation]().union(*(needed_by(each.operands, maker) for each in found))
    last = found - waited_for
    cotangents = {number for each in last for number in numbers_of(each.operands)}
    needed = needed_by(streams, maker)
    late = [
        each
        for each in equations
        if _is_product(each) and each not in needed and cotangents & {*numbers_of(each.operands)}
    ]
    return last, late


def _dealt_out(
    equations: list[Equation], late: list[Equation]
) -> tuple[list[Equation], list[Equation]]:
    """Return the equations that do not read late products, and late products with all that do."""
    now, behind, waiting = list[Equation](), list[Equation](), set[int]()
    for each in equations:
        read = [number in waiting for number in each.operands]
        if each.primitive in _ORDERS and any(read):
            waits = [_part(each, [place]) for place, late in enumerate(read) if late]
            now.append(_part(each, [place for place, late in enumerate(read) if not late]))
        elif each in late or any(read):
            waits = [each]
        else:
            now.append(each)
            continue
        behind += waits
        waiting.update(number for each in waits for number in each.results)
    return now, behind


def _part(equation: Equation, places: Sequence[int]) -> Equation:
    """Return an equation of `_ORDERS` of some of its operands."""

    def chosen(of_all: Sequence[Any]) -> tuple[Any, ...]:
        return tuple(of_all[place] for place in places)

    return dataclasses.replace(
        equation,
        operands=chosen(equation.operands),
        results=chosen(equation.results),
        sizes=chosen(equation.sizes),
    )


def _is_product(equation: Equation) -> bool:
    name: str = equation.primitive.name
    return name == "dot_general"
