"""Overlap in a compiled program: the matrix products that run while a message travels.

A compiler splits a collective that need not be awaited at once into a start and a done, and orders
all instructions; those between the two run beside the message.
"""

import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass

import jax
from jax.sharding import AbstractMesh, Mesh

from geojax.errors import UserError
from geojax.hlo.module import Computation, Instruction, Module, parse_module
from geojax.hlo.traffic import Collective, collective_traffic, program_text

_SCHEDULED = re.compile(r"^HloModule .*\bis_scheduled=true", re.MULTILINE)
_PRODUCT_CALL = re.compile(
    r'custom_call_target="[^"]*(?:cublas|cudnn|fmha|gemm|matmul|mosaic|triton)'
)


@dataclass(frozen=True)
class Flight:
    """A collective between its start and its done."""

    collective: Collective
    start: str
    """Name of the instruction that starts it."""
    products: int
    """Number of instructions between the two that hold matrix products (or attention): fusions,
    calls of libraries, whole loops."""
    products_around: int
    """Number of all such instructions of the same computation, the body of a loop for example."""


def flights(
    program: jax.stages.Compiled, mesh: Mesh | AbstractMesh, *, longest_loop: int | None = None
) -> tuple[Flight, ...]:
    """List the asynchronous collectives of `program`, in the order in which they are done.

    Args:
        program: compiled for `mesh`, perhaps ahead of time.
        mesh: the mesh.
        longest_loop: as for `geojax.hlo.collective_traffic`.

    Raises:
        UserError: the program is not scheduled, or was compiled for another mesh.
        HloParseError: the text of the program cannot be read.
    """
    text = program_text(program)
    if not _SCHEDULED.search(text):
        raise UserError("collective overlap: this program has no schedule; compile it for GPUs")
    traffic = collective_traffic(text, mesh, longest_loop=longest_loop)
    collectives = {found.name: found for found in traffic.collectives}
    module = parse_module(text)
    reader = _FlightReader(module, collectives)
    return tuple(
        flight
        for computation in module.computations.values()
        for flight in reader.read(computation)
    )


class _FlightReader:
    def __init__(self, module: Module, collectives: dict[str, Collective]) -> None:
        self._module = module
        self._collectives = collectives
        self._multiplies = functools.cache(self._has_products)

    def read(self, computation: Computation) -> Iterator[Flight]:
        started: dict[str, tuple[Collective, int]] = {}
        done = []
        products = 0
        for instruction in computation:
            if instruction.opcode.endswith("-start"):
                collective = self._started_by(instruction)
                if collective is not None:
                    started[instruction.name] = collective, products
            elif instruction.opcode.endswith("-done"):
                if instruction.operands[0] in started:
                    collective, before = started.pop(instruction.operands[0])
                    done.append((collective, instruction.operands[0], products - before))
            elif self._is_product(instruction):
                products += 1
        for collective, start, between in done:
            yield Flight(collective, start, between, products)

    def _started_by(self, start: Instruction) -> Collective | None:
        wrapped = [
            instruction.name
            for name in start.calls
            for instruction in self._module.computations.get(name, ())
        ]
        names = (name for name in (start.name, *wrapped) if name in self._collectives)
        return next((self._collectives[name] for name in names), None)

    def _is_product(self, instruction: Instruction) -> bool:
        if instruction.opcode in ("dot", "convolution"):
            return True
        if instruction.opcode == "custom-call" and _PRODUCT_CALL.search(instruction.tail):
            return True
        return any(self._multiplies(name) for name in instruction.calls)

    def _has_products(self, name: str) -> bool:
        computation = self._module.computations.get(name)
        return computation is not None and any(map(self._is_product, computation))
