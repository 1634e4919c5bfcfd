"""Trip counts of the while loops of an HLO module.

The compiler usually writes it down (`known_trip_count`). Otherwise, as in a lowered program, the
count follows from a counter in the loop's state. A counter starts at a constant, the body raises it
by a constant, and the condition compares it with a constant.
"""

import re
from dataclasses import dataclass
from typing import TypeAlias

from geojax.hlo.module import Computation, Instruction, Module

_KNOWN = re.compile(r'"?known_trip_count"?\s*:\s*\{\s*"?n"?\s*:\s*"?(\d+)"?')
_TRANSPARENT = ("copy", "convert", "bitcast", "reshape", "optimization-barrier")
_MIRRORED = {"LT": "GT", "LE": "GE", "GT": "LT", "GE": "LE", "NE": "NE"}


@dataclass(frozen=True)
class _Linear:
    """An integer: a constant, plus an element of the loop's state unless `element` is None."""

    element: int | None
    constant: int


_Value: TypeAlias = "_Linear | tuple[_Value, ...] | None"
"""A value as far as it is known: an integer, the elements of a tuple, or None."""


def trip_count(module: Module, caller: Computation, loop: Instruction) -> int | None:
    """Return how often the body of `loop`, a `while` in `caller`, runs.

    Args:
        module: the program.
        caller: the computation that holds the loop.
        loop: the loop.

    Returns:
        The number; None where it is data of the run, such as the blocks of tokens that came to an
        expert.
    """
    known = _KNOWN.search(loop.tail)
    return int(known[1]) if known else _counted(module, caller, loop)


def _counted(module: Module, caller: Computation, loop: Instruction) -> int | None:
    condition = module.computations[loop.attributes["condition"].lstrip("%")]
    body = module.computations[loop.attributes["body"].lstrip("%")]
    compared = _comparison(module, condition)
    if compared is None:
        return None
    counter, direction, limit = compared
    assert counter.element is not None, "the comparison is of a counter"
    first = _evaluate_element(module, caller, loop.operands[0], counter.element)
    after = _evaluate_element(module, body, body.root, counter.element)
    if first is None or first.element is not None:
        return None
    if after is None or after.element != counter.element:
        return None
    return _count(first.constant + counter.constant, after.constant, direction, limit)


def _count(value: int, step: int, direction: str, limit: int) -> int | None:
    """Count how many of value, value + step, ... compare true with `limit` before one does not."""
    if direction in ("GT", "GE"):
        value, step, limit = -value, -step, -limit
        direction = _MIRRORED[direction]
    if direction == "LE":
        limit += 1
    if value >= limit and direction != "NE":
        return 0
    if step == 0 or (limit - value) * step < 0 or (direction == "NE" and (limit - value) % step):
        return None
    return -(-(limit - value) // step)


def _comparison(module: Module, condition: Computation) -> tuple[_Linear, str, int] | None:
    """Return (counter, direction, limit) if the condition compares a counter with a constant."""
    computation, root = condition, condition.instructions[condition.root]
    bound: dict[str, _Value] = {}
    while root.opcode in ("fusion", "call"):
        inside = module.computations[root.calls[0]]
        bound = _bind(module, computation, root, inside, bound)
        computation, root = inside, inside.instructions[inside.root]
    if root.opcode != "compare":
        return None
    left, right = (_evaluate(module, computation, name, bound) for name in root.operands)
    direction = root.attributes.get("direction", "")
    if not (isinstance(left, _Linear) and isinstance(right, _Linear)) or direction not in _MIRRORED:
        return None
    if left.element is None:
        left, right, direction = right, left, _MIRRORED[direction]
    if left.element is None or right.element is not None:
        return None
    return left, direction, right.constant


def _evaluate_element(
    module: Module, computation: Computation, name: str, element: int
) -> _Linear | None:
    value = _evaluate(module, computation, name, {})
    if not isinstance(value, tuple) or element >= len(value):
        return None
    found = value[element]
    return found if isinstance(found, _Linear) else None


def _bind(
    module: Module,
    computation: Computation,
    call: Instruction,
    inside: Computation,
    bound: dict[str, _Value],
) -> dict[str, _Value]:
    """Evaluate the parameters of `inside` when `call` calls it."""
    return {
        instruction.name: _evaluate(
            module, computation, call.operands[int(instruction.operands[0])], bound
        )
        for instruction in inside
        if instruction.opcode == "parameter"
    }


def _evaluate(
    module: Module, computation: Computation, name: str, bound: dict[str, _Value]
) -> _Value:
    """Evaluate instruction `name` as far as possible.

    `bound` holds the parameters of a called computation; one that is not bound is the loop's
    state.
    """
    if name in bound:
        return bound[name]
    instruction = computation.instructions[name]
    opcode, operands = instruction.opcode, instruction.operands
    if opcode == "constant":
        integer = re.fullmatch(r"-?\d+", operands[0]) if operands else None
        return _Linear(None, int(operands[0])) if integer else None
    if opcode == "get-tuple-element":
        index = int(instruction.attributes["index"])
        source = computation.instructions[operands[0]]
        if source.opcode == "parameter" and source.name not in bound:
            return _Linear(index, 0)
        whole = _evaluate(module, computation, operands[0], bound)
        return whole[index] if isinstance(whole, tuple) and index < len(whole) else None
    if opcode == "tuple":
        return tuple(_evaluate(module, computation, operand, bound) for operand in operands)
    if opcode in _TRANSPARENT:
        return _evaluate(module, computation, operands[0], bound)
    if opcode in ("add", "subtract"):
        left, right = (_evaluate(module, computation, operand, bound) for operand in operands)
        return _sum(left, right, 1 if opcode == "add" else -1)
    if opcode in ("fusion", "call"):
        inside = module.computations[instruction.calls[0]]
        arguments = _bind(module, computation, instruction, inside, bound)
        return _evaluate(module, inside, inside.root, arguments)
    return None


def _sum(left: _Value, right: _Value, sign: int) -> _Value:
    if not (isinstance(left, _Linear) and isinstance(right, _Linear)):
        return None
    if right.element is not None and (left.element is not None or sign < 0):
        return None
    element = left.element if right.element is None else right.element
    return _Linear(element, left.constant + sign * right.constant)
