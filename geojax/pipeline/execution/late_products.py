"""Products of weights' gradients that wait for a tick's streams, which then travel beside them.

A tick ends with the streams that it sends, and nothing is left to compute beside their hops. The
gradients of the weights that a layer multiplies its input by can wait: they read the cotangents
that the last products of the input's own cotangent read, and nothing in the tick reads them.

    a tick   .. last products ─► scatter ─► cotangent ─► hop ─►
                                            late products ─► sums
"""

import dataclasses
from typing import TypeVar

import jax

from geojax.collectives import barrier, token_of
from geojax.collectives.order import held_until
from geojax.models.chunk.equations import Constant, Equation, needed_by, numbers_of, run
from geojax.pipeline.execution.summed_products import (
    adding_products,
    summed_products,
    sums_first,
)
from geojax.pipeline.execution.tick_equations import (
    ORDERS,
    Made,
    Passes,
    TickEquations,
    is_product,
    part_of,
)

State = TypeVar("State")


def with_late_products(
    passes: Passes[State, Made], state: State
) -> tuple[State, Made, list[jax.Array]]:
    """Return the results of `passes(state)`, and the sums that wait for its streams.

    Products of weights' gradients add to sums (`geojax.pipeline.execution.summed_products`).

    Args:
        passes: a forward and a backward.
        state: a pytree of arrays.
    """
    tick = TickEquations.of(passes, state)
    summed = summed_products(tick)
    tick = adding_products(tick, summed)
    last, late = _last_and_late(tick)
    now, behind = _dealt_out(tick.equations, late)
    now = sums_first(tick, now, summed)
    values = dict(enumerate(tick.state))
    if not late:
        run(now, values)
        return *tick.results(values), []
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
    sent = barrier([values[each] for each in tick.streams])
    values.update(zip(tick.streams, sent, strict=True))
    token = token_of(sent)
    for each in behind:
        if each.primitive in ORDERS:  # nothing may stand between a product and its sum
            values[each.results[0]] = values[each.operands[0]]
        else:
            run([held(each, token) if each in late else each], values)
    products = {number for each in late for number in each.results}
    sums = [each.sum.results[0] for each in summed if products & {*each.product.results}]
    return *tick.results(values), [values[each] for each in sums]


def _last_and_late(tick: TickEquations) -> tuple[set[Equation], list[Equation]]:
    """Return the last products of the cotangent, the first stream, and those that can wait.

    A last product is one that no other separates from the cotangent, and that waits for none of
    these.
    """
    maker = tick.maker
    found, seen, wanted = set[Equation](), set[Equation](), numbers_of(tick.streams[:1])
    while wanted:
        made_by = maker.get(wanted.pop())
        if made_by is not None and made_by not in seen:
            seen.add(made_by)
            if is_product(made_by):
                found.add(made_by)
            else:
                wanted += numbers_of(made_by.operands)
    waited_for = set[Equation]().union(*(needed_by(each.operands, maker) for each in found))
    last = found - waited_for
    cotangents = {number for each in last for number in numbers_of(each.operands)}
    late = [
        each
        for each in tick.equations
        if is_product(each)
        and each not in tick.needed
        and cotangents & {*numbers_of(each.operands)}
    ]
    return last, late


def _dealt_out(
    equations: list[Equation], late: list[Equation]
) -> tuple[list[Equation], list[Equation]]:
    """Return the equations that do not read late products, and late products with all that do."""
    now, behind, waiting = list[Equation](), list[Equation](), set[int]()
    for each in equations:
        read = [number in waiting for number in each.operands]
        if each.primitive in ORDERS and any(read):
            waits = [part_of(each, [place]) for place, late in enumerate(read) if late]
            now.append(part_of(each, [place for place, late in enumerate(read) if not late]))
        elif each in late or any(read):
            waits = [each]
        else:
            now.append(each)
            continue
        behind += waits
        waiting.update(number for each in waits for number in each.results)
    return now, behind
