"""Products of weights' gradients that add to the sums over microbatches themselves.

XLA for GPUs adds a product to an array in the product's own output, in place: 8 bytes of memory a
weight, where a product in 16 bits and a pass that adds it take 12. It does so where the product has
the dtype of its sum, and only changes of shape stand between them: no rounding, and no barrier.

    traced    product ─► together with a message ─► float32 ─► sum
    run       product in float32 ─► sum ─► the message's readers

What waits for a product in the traced program waits for its sum.
"""

import dataclasses
import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

from geojax.collectives.order import apart_p, held_p
from geojax.models.chunk.equations import Equation, numbers_of, run
from geojax.pipeline.execution.tick_equations import (
    ORDERS,
    Made,
    Passes,
    TickEquations,
    identity_of,
    is_product,
)

State = TypeVar("State")

_SHAPES = frozenset(
    (
        "broadcast_in_dim",
        "convert_element_type",
        "pcast",
        "pvary",
        "reshape",
        "squeeze",
        "transpose",
    )
)
"""Primitives that may stand between a product and its sum: they change its shape and its type."""


class SummedProduct(NamedTuple):
    """A product, and the equations through which it comes to its sum."""

    product: Equation
    between: tuple[Equation, ...]
    sum: Equation
    dtype: Any

    @property
    def numbers(self) -> set[int]:
        """The numbers of the product in all its shapes."""
        return {number for each in (self.product, *self.between) for number in each.results}


def summed_products(tick: TickEquations) -> list[SummedProduct]:
    """Return the products of a tick that nothing but a sum of one of its inputs reads."""
    readers: dict[int, list[Equation | None]] = {}
    for each in tick.equations:
        for number in numbers_of(each.operands):
            readers.setdefault(number, []).append(each)
    for number in numbers_of(tick.outputs):
        readers.setdefault(number, []).append(None)
    gradients = [each for each in tick.equations if is_product(each) and each not in tick.needed]
    found = (_summed(each, readers, tick.state) for each in gradients)
    return [each for each in found if each]


def _summed(
    product: Equation, readers: dict[int, list[Equation | None]], state: Sequence[Any]
) -> SummedProduct | None:
    number, between = product.results[0], list[Equation]()
    while len(own := readers.get(number, [])) == 1 and own[0] is not None:
        each = own[0]
        if each.primitive in ORDERS:
            number = each.results[each.operands.index(number)]
        elif each.primitive.name in _SHAPES:
            number = each.results[0]
        else:
            others = numbers_of(operand for operand in each.operands if operand != number)
            if each.primitive.name != "add" or not others or others[0] >= len(state):
                return None
            return SummedProduct(product, tuple(between), each, state[others[0]].dtype)
        between.append(each)
    return None


def with_summed_products(passes: Passes[State, Made], state: State) -> tuple[State, Made]:
    """Return the results of `passes(state)`, whose products of weights' gradients add to sums."""
    tick = TickEquations.of(passes, state)
    summed = summed_products(tick)
    values = dict(enumerate(tick.state))
    tick = adding_products(tick, summed)
    run(sums_first(tick, tick.equations, summed), values)
    return tick.results(values)


def _root(number: int, tick: TickEquations) -> int:
    """Return the number of an array in its first shape."""
    while (made_by := tick.maker.get(number)) and made_by.primitive.name in _SHAPES:
        (number,) = numbers_of(made_by.operands)
    return number


def adding_products(tick: TickEquations, summed: Sequence[SummedProduct]) -> TickEquations:
    """Return the tick with products in the dtype of their sums, so that nothing rounds them.

    Those that read the same array are told apart (`geojax.collectives.order.told_apart`): XLA would
    make one of some, and their sums would read slices of it.
    """
    dtype_of = {each.product: each.dtype for each in summed}
    readers = Counter[int]()
    made = list[Equation]()

    def told_apart(equation: Equation, operand: int) -> int:
        """Return the number of the same operand, of an array that no product before has read."""
        root = _root(operand, tick)
        before = readers[root]
        readers[root] += 1
        if not before:
            return operand
        array, transposes = operand, list[Equation]()
        while (made_by := tick.maker.get(array)) and made_by.primitive.name == "transpose":
            transposes.insert(0, made_by)
            (array,) = numbers_of(made_by.operands)
        for _ in range(before):
            made.append(identity_of(equation, apart_p, (array,), array := next(tick.fresh)))
        # XLA folds a transpose into the product, but not across a barrier.
        for transpose in transposes:
            operands, array = (array,), next(tick.fresh)
            made.append(dataclasses.replace(transpose, operands=operands, results=(array,)))
        return array

    for equation in tick.equations:
        if equation in dtype_of:
            parameters = equation.parameters | {"preferred_element_type": dtype_of[equation]}
            operands = tuple(told_apart(equation, operand) for operand in equation.operands)
            equation = dataclasses.replace(equation, operands=operands, parameters=parameters)
        made.append(equation)
    return dataclasses.replace(tick, equations=made)


def sums_first(
    tick: TickEquations, equations: Iterable[Equation], summed: Sequence[SummedProduct]
) -> list[Equation]:
    """Return some equations of a tick with sums before what waits for products, which now waits."""
    product_of = {number: each for each in summed for number in each.numbers}
    passed = {
        result: operand
        for each in summed
        for order in each.between
        if order.primitive in ORDERS
        for operand, result in zip(order.operands, order.results, strict=True)
        if operand in product_of
    }
    made, done = list[Equation](), set[Equation]()

    def append(equation: Equation) -> None:
        done.add(equation)
        while passed.keys() & {*numbers_of(equation.operands)}:
            operands = tuple(passed.get(each, each) for each in equation.operands)
            equation = dataclasses.replace(equation, operands=operands)
        made.append(equation)

    for equation in equations:
        of_products = [n for n in numbers_of(equation.operands) if n in product_of]
        if equation.primitive not in ORDERS or not of_products:
            if equation not in done:
                append(equation)
            continue
        own = [product_of[number] for number in of_products]
        for step in (step for each in own for step in (*each.between, each.sum)):
            if step.primitive not in ORDERS and step not in done:
                append(step)
        for operand, result in zip(equation.operands, equation.results, strict=True):
            if operand not in product_of:
                steps = [operand, *itertools.islice(tick.fresh, len(own) - 1), result]
                for (before, behind), each in zip(itertools.pairwise(steps), own, strict=True):
                    append(identity_of(equation, held_p, (before, *each.sum.results), behind))
    return made
