"""A traced program as one list of operations on buffers, the way a compiler sees it.

Calls are written out in place, and operations that only rename a buffer (a reshape, a cast of its
type's axes) disappear. Loops and branches keep their bodies, each a flat program of its own.
"""

import dataclasses
import math
import re
from collections.abc import Sequence
from typing import Any

import jax
from jax.extend import core

from geojax.planner import primitives


class Buffer:
    """A value of the program, which may or may not lie in memory."""

    __slots__ = ("dtype", "kind", "materialized", "moved", "shape")

    def __init__(self, shape: tuple[int, ...], dtype: Any):
        self.shape, self.dtype = shape, dtype
        self.kind = ""
        self.materialized = (
            False  # True if it passes an optimization barrier, and so lies in memory
        )
        self.moved = False  # True if a collective makes it, or a loop only writes slices into it

    @property
    def bytes(self) -> int:
        """The bytes that it takes if it lies in memory."""
        itemsize: int = getattr(self.dtype, "itemsize", 0)
        return self.size * itemsize

    @property
    def size(self) -> int:
        """The number of its elements."""
        return math.prod(self.shape)

    @property
    def floating(self) -> bool:
        """True if it holds floating-point numbers."""
        return self.dtype is not None and jax.dtypes.issubdtype(self.dtype, jax.numpy.floating)


@dataclasses.dataclass(frozen=True, eq=False)
class Operation:
    """One equation of the program."""

    name: str
    scopes: tuple[str, ...]
    """The `jax.named_scope`s and loops that it stands in, outermost first. JAX adds names to those
    of a derivative: ("transpose", "jvp", "head")."""
    inputs: tuple[Buffer, ...]
    """The buffers that it reads; literals are left out."""
    outputs: tuple[Buffer, ...]
    parameters: dict[str, Any]
    input_dims: tuple[int, ...] = ()
    """The number of dims of each input of a loop or branch. The buffer may have been made with
    another shape."""

    @property
    def fusible(self) -> bool:
        """True if it can be computed where its result is read."""
        return self.name not in primitives.READS_MEMORY | primitives.REDUCES | primitives.IN_PLACE

    @property
    def reads_memory(self) -> bool:
        """True if its operands have to lie in memory."""
        return self.name in primitives.READS_MEMORY

    @property
    def waits(self) -> bool:
        """True if it is a barrier: it has no results, and its operands are there when it runs."""
        return self.name in primitives.BARRIERS

    @property
    def sends(self) -> bool:
        """True if it is a collective."""
        return self.name in primitives.COLLECTIVES

    @property
    def in_place(self) -> bool:
        """True if a result may take the place of an operand that is not read later."""
        return self.fusible or self.name in primitives.IN_PLACE

    @property
    def expensive(self) -> bool:
        """True if it is never computed twice."""
        return self.name in primitives.EXPENSIVE


@dataclasses.dataclass(frozen=True)
class FlatProgram:
    """The operations of a program or of a loop's body, in order."""

    constants: tuple[Buffer, ...]
    inputs: tuple[Buffer, ...]
    operations: tuple[Operation, ...]
    outputs: tuple[Buffer | None, ...]
    """The results; None stands for a literal."""
    output_dims: tuple[int, ...]
    """The number of dims of each result."""


def flatten(jaxpr: core.Jaxpr | core.ClosedJaxpr, scopes: tuple[str, ...] = ()) -> FlatProgram:
    """Flatten `jaxpr`, which stands in `scopes`."""
    inner = getattr(jaxpr, "jaxpr", jaxpr)
    buffers: dict[Any, Buffer] = {}
    constants, inputs = (
        tuple(buffers.setdefault(variable, _buffer(variable)) for variable in variables)
        for variables in (inner.constvars, inner.invars)
    )
    operations: list[Operation] = []
    _append(inner, buffers, operations, scopes)
    return FlatProgram(
        constants,
        inputs,
        tuple(operations),
        tuple(_read(inner.outvars, buffers)),
        tuple(len(_buffer(variable).shape) for variable in inner.outvars),
    )


def _append(
    jaxpr: Any,
    buffers: dict[Any, Buffer],
    operations: list[Operation],
    outer_scopes: tuple[str, ...],
) -> None:
    for equation in jaxpr.eqns:
        own = re.split("[/()]", str(equation.source_info.name_stack))
        scopes = (*outer_scopes, *(scope for scope in own if scope))
        name = equation.primitive.name
        inputs = _read(equation.invars, buffers)
        called = _called(equation)
        if called is not None:
            inside: dict[Any, Buffer] = {
                variable: _buffer(variable) for variable in called.constvars
            }
            for variable, buffer in zip(called.invars, inputs, strict=True):
                inside[variable] = buffer or _buffer(variable)
            _append(called, inside, operations, scopes)
            for variable, result in zip(
                equation.outvars, _read(called.outvars, inside), strict=True
            ):
                buffers[variable] = result or _buffer(variable)
        elif name in primitives.BARRIERS:
            for variable, buffer in zip(equation.outvars, inputs, strict=True):
                buffers[variable] = buffer or _buffer(variable)  # a literal becomes a buffer
                buffers[variable].materialized = True
            passed = tuple(buffers[variable] for variable in equation.outvars)
            operations.append(Operation(name, scopes, passed, (), equation.params))
        elif name in primitives.RENAMES and inputs[0] is not None:
            buffers.update(dict.fromkeys(equation.outvars, inputs[0]))
        else:
            outputs = tuple(_buffer(variable) for variable in equation.outvars)
            for output in outputs:
                output.moved = name in primitives.COLLECTIVES
            buffers.update(zip(equation.outvars, outputs, strict=True))
            known = tuple(buffer for buffer in inputs if buffer is not None)
            dims: tuple[int, ...] = ()
            if name in ("scan", "while", "cond"):  # positions matter: literals become buffers
                known = tuple(
                    buffer or _buffer(variable)
                    for buffer, variable in zip(inputs, equation.invars, strict=True)
                )
                dims = tuple(len(_buffer(variable).shape) for variable in equation.invars)
            operations.append(Operation(name, scopes, known, outputs, equation.params, dims))


def _called(equation: Any) -> Any:
    """Return the jaxpr that an equation only calls, or None; a loop of one iteration is a call."""
    if equation.primitive.name == "scan" and equation.params["length"] == 1:
        body = equation.params["jaxpr"]
        return getattr(body, "jaxpr", body)
    if equation.primitive.name in primitives.READS_MEMORY:
        return None
    for key in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
        called = equation.params.get(key)
        if called is not None:
            return getattr(called, "jaxpr", called)
    return None


def _read(variables: Sequence[Any], buffers: dict[Any, Buffer]) -> list[Buffer | None]:
    return [
        None if isinstance(variable, core.Literal) else buffers[variable] for variable in variables
    ]


def _buffer(variable: Any) -> Buffer:
    aval = variable.aval
    return Buffer(tuple(getattr(aval, "shape", ())), _plain_dtype(aval))


def _plain_dtype(aval: Any) -> Any:
    dtype = getattr(aval, "dtype", None)
    if dtype is not None and jax.dtypes.issubdtype(dtype, jax.dtypes.extended):
        return jax.numpy.dtype("uint64")  # a key: two words
    return dtype
