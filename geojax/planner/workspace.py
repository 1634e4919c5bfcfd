"""The memory that a piece of a program needs beside its arguments: a layer's backward, the head.

The piece is traced, and its values are followed in the order in which they were written. Most are
computed where they are read, as compilers fuse them. A value lies in memory where an operation
reads memory (a matrix product, a collective, a sort), where it is costly and read twice, and where
it is a result. It is freed behind its last reader, whose result takes its place if it is as large.
"""

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any

from jax.extend import core

_RENAMES = frozenset(
    (
        "after", "barrier", "bitcast_convert_type", "copy", "copy_p", "drop_single", "expand_dims",
        "layout_constraint", "name", "optimization_barrier", "pcast", "pvary", "reshape", "squeeze",
        "stop_gradient", "transpose",
    )
)  # fmt: skip
"""Primitives whose results are their operands under another name."""

_IN_PLACE = frozenset(("dynamic_update_slice", "scan", "scatter", "scatter-add", "while"))
"""Primitives that change a few entries of an operand, and loops, which carry theirs."""

_CHEAP = frozenset(
    (
        "abs", "add", "add_any", "and", "broadcast_in_dim", "concatenate", "convert_element_type",
        "dynamic_slice", "eq", "gather", "ge", "gt", "integer_pow", "iota", "is_finite", "le", "lt",
        "max", "min", "mul", "ne", "neg", "not", "or", "pad", "reduce_precision", "rev",
        "select_n", "shift_left", "shift_right_arithmetic", "shift_right_logical", "sign", "slice",
        "split", "square", "sub", "xor",
    )
)  # fmt: skip
"""Primitives that every reader computes for itself."""

_COSTLY = frozenset(
    (
        "cos", "div", "erf", "exp", "exp2", "expm1", "log", "log1p", "logistic", "pow",
        "random_bits", "rem", "rsqrt", "sin", "sqrt", "tanh", "threefry2x32",
    )
)  # fmt: skip
"""Primitives that are fused too, but never computed twice."""

_COLLECTIVES = frozenset(
    (
        "all_gather", "all_gather_invariant", "all_gather_reduced", "all_to_all", "pmax", "pmin",
        "ppermute", "psum", "psum_invariant", "ragged_all_to_all", "reduce_scatter",
        "unreduced_reduce_scatter",
    )
)  # fmt: skip
"""Primitives that send between devices."""

_SUMS = frozenset(("pmax", "pmin", "psum", "psum_invariant"))

_LEAST_SUMMED = 2**20
"""Least bytes of a sum over devices that others run beside."""

_REDUCTIONS = frozenset(
    (
        "argmax", "argmin", "reduce", "reduce_and", "reduce_max", "reduce_min", "reduce_or",
        "reduce_prod", "reduce_sum",
    )
)  # fmt: skip
"""Primitives that compute what they read, and whose results lie in memory."""


@dataclasses.dataclass(eq=False)
class _Value:
    """A value of the program."""

    bytes: int
    in_memory: bool = False
    sources: frozenset["_Value"] = frozenset()
    """The values in memory that it is computed from; itself, where it lies there."""


@dataclasses.dataclass(frozen=True, eq=False)
class _Operation:
    """One equation: the values that it reads and makes."""

    name: str
    operands: tuple[_Value, ...]
    results: tuple[_Value, ...]
    inner_bytes: int = 0
    """The bytes that its own programs need beside operands and results."""

    @property
    def fused(self) -> bool:
        """True if it may be computed where its results are read."""
        return self.name in _CHEAP or self.name in _COSTLY

    @property
    def travels(self) -> bool:
        """True if others run beside it: not for the few numbers that a softmax sums."""
        few = sum(value.bytes for value in self.operands) < _LEAST_SUMMED
        return self.name in _COLLECTIVES and not (few and self.name in _SUMS)


def peak_bytes(program: core.ClosedJaxpr | core.Jaxpr) -> int:
    """Return the bytes that a program holds at its peak beside its arguments, results included."""
    jaxpr = getattr(program, "jaxpr", program)
    values: dict[Any, _Value] = {
        variable: _argument(variable) for variable in (*jaxpr.constvars, *jaxpr.invars)
    }
    arguments = frozenset(values.values())
    operations: list[_Operation] = []
    _flatten(jaxpr, values, operations)
    results = {_read(variable, values) for variable in jaxpr.outvars} - arguments
    _place(operations, results)
    return _walk(_collectives_first(operations), arguments, results)


def _argument(variable: Any) -> _Value:
    value = _Value(_bytes(variable), in_memory=True)
    value.sources = frozenset((value,))
    return value


def _bytes(variable: Any) -> int:
    shape, dtype = getattr(variable.aval, "shape", ()), getattr(variable.aval, "dtype", None)
    return math.prod(shape) * getattr(dtype, "itemsize", 0)


def _read(variable: Any, values: dict[Any, _Value]) -> _Value:
    return _Value(0) if isinstance(variable, core.Literal) else values[variable]


def _flatten(jaxpr: Any, values: dict[Any, _Value], operations: list[_Operation]) -> None:
    """Append the operations of a program; calls are written out in place."""
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        operands = tuple(_read(variable, values) for variable in equation.invars)
        called = _called(equation)
        if called is not None:
            inside = {variable: _argument(variable) for variable in called.constvars}
            inside |= dict(zip(called.invars, operands, strict=True))
            _flatten(called, inside, operations)
            made = [_read(variable, inside) for variable in called.outvars]
            values.update(zip(equation.outvars, made, strict=True))
        elif name in _RENAMES:
            values.update(zip(equation.outvars, operands, strict=False))
            if name in ("barrier", "optimization_barrier"):
                operations.append(_Operation(name, operands, ()))
        else:
            results = tuple(_Value(_bytes(variable)) for variable in equation.outvars)
            values.update(zip(equation.outvars, results, strict=True))
            operations.append(_Operation(name, operands, results, _inner_bytes(equation)))


def _called(equation: Any) -> Any:
    """Return the program that an equation only calls; None where it is an operation."""
    parameters = equation.params
    name = equation.primitive.name
    if name == "scan" and parameters["length"] == 1:
        return parameters["jaxpr"].jaxpr
    if name in ("scan", "while", "cond", "pallas_call", "custom_vmap_call", "mpmd_map"):
        return None
    for key in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
        called = parameters.get(key)
        if called is not None:
            return getattr(called, "jaxpr", called)
    return None


def _inner_bytes(equation: Any) -> int:
    """Return the bytes that the bodies of a loop, or the largest of all branches, need."""
    match equation.primitive.name:
        case "scan":
            bodies = [equation.params["jaxpr"]]
        case "while":
            bodies = [equation.params["body_jaxpr"]]
        case "cond":
            bodies = equation.params["branches"]
        case _:
            return 0
    carried = sum(map(_bytes, equation.outvars))
    # What a body returns takes the place of the results, which are counted outside.
    return max(0, *(peak_bytes(body) - min(carried, _result_bytes(body)) for body in bodies))


def _result_bytes(body: Any) -> int:
    return sum(_bytes(variable) for variable in body.jaxpr.outvars)


def _place(operations: Sequence[_Operation], results: Iterable[_Value]) -> None:
    """Tell which values lie in memory, and what the others are computed from."""
    for value in results:
        value.in_memory = True
    added_up = _added_up(operations)
    readers: dict[_Value, set[_Operation]] = {}
    for operation in reversed(operations):
        own: set[_Operation] = set()
        for value in operation.results:
            of_it = readers.get(value, set())
            costly = operation.name in _COSTLY and len(of_it) > 1
            if costly or not (operation.fused or value in added_up):
                value.in_memory = True
            own |= {operation} if value.in_memory else of_it
        needs_memory = not operation.fused and operation.name not in _REDUCTIONS
        for value in operation.operands:
            readers.setdefault(value, set()).update(own or {operation})
            value.in_memory |= needs_memory
    for operation in operations:
        read = frozenset[_Value]().union(*(value.sources for value in operation.operands))
        for value in operation.results:
            value.sources = frozenset((value,)) if value.in_memory else read


def _added_up(operations: Sequence[_Operation]) -> set[_Value]:
    """Return the products that are added to sums as they are made, in the sums' place."""
    readers: dict[_Value, list[_Operation]] = {}
    for operation in operations:
        for value in operation.operands:
            readers.setdefault(value, []).append(operation)
    found = set()
    for operation in operations:
        if operation.name == "dot_general":
            (product,) = operation.results
            match readers.get(product, []):
                case [_Operation(name="add" | "add_any", results=(total,))]:
                    if total.bytes == product.bytes and not total.in_memory:
                        found.add(product)
                        total.in_memory = True
    return found


def _reads(operation: _Operation) -> frozenset[_Value]:
    """Return the values in memory that an operation reads."""
    return frozenset[_Value]().union(*(value.sources for value in operation.operands))


def _collectives_first(operations: Sequence[_Operation]) -> list[_Operation]:
    """Start each collective as soon as what it sends is there, and run beside it what can wait."""
    running = [
        operation
        for operation in operations
        if not operation.fused or any(value.in_memory for value in operation.results)
    ]
    maker = {value: operation for operation in running for value in operation.results}
    order: dict[_Operation, None] = {}
    travelling: set[_Value] = set()
    waiting: list[_Operation] = []
    for operation in running:
        waiting.append(operation)
        if not operation.travels:
            continue
        needed, missing = {operation}, [operation]
        while missing:
            for value in _reads(missing.pop()):
                source = maker.get(value)
                if source is not None and source not in order and source not in needed:
                    needed.add(source)
                    missing.append(source)
        for other in [other for other in waiting if other in needed]:
            if not travelling.isdisjoint(_reads(other)):  # it has arrived: the rest ran meanwhile
                order.update(dict.fromkeys(each for each in waiting if each not in needed))
                travelling.clear()
            order[other] = None
        travelling.update(operation.results)
        waiting = [other for other in waiting if other not in order]
    return [*order, *waiting]


def _walk(
    operations: Sequence[_Operation], arguments: frozenset[_Value], results: set[_Value]
) -> int:
    """Return the most bytes held beside the arguments."""
    reads = [_reads(operation) for operation in operations]
    last_read = {value: index for index, read in enumerate(reads) for value in read}
    first_read: dict[_Value, int] = {}
    for index, read in enumerate(reads):
        for value in read:
            first_read.setdefault(value, index)
    for index, operation in enumerate(operations):
        if operation.travels:  # what it sends is held until its result is read
            arrives = min(first_read.get(value, index + 1) for value in operation.results)
            for value in reads[index]:
                last_read[value] = max(last_read[value], arrives - 1)
    dying: dict[int, list[_Value]] = {}
    for value, index in last_read.items():
        if value not in arguments and value not in results:
            dying.setdefault(index, []).append(value)
    held = peak = 0
    for index, operation in enumerate(operations):
        made = [value for value in operation.results if value.in_memory]
        freed = dying.get(index, [])
        in_place = operation.fused or operation.name in _IN_PLACE
        for value in made:
            fitting = (old for old in freed if old.bytes == value.bytes and in_place)
            replaced = next(fitting, None)
            if replaced is not None:
                freed.remove(replaced)
                held -= replaced.bytes
            held += value.bytes
        peak = max(peak, held + operation.inner_bytes)
        held -= sum(value.bytes for value in freed)
        held -= sum(
            value.bytes for value in made if value not in last_read and value not in results
        )
    return peak
