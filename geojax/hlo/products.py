"""FLOPs of a compiled program's matrix products with weights.

Counted from the program's text, as a device runs it: what a loop holds, once for each iteration; of
a conditional the branch with most, or the one with a library's attention, whose stand-in the others
are. Attention's products are left out, by their batch dims or inside a library's call; so are
kernels whose insides the text does not show (Pallas).
"""

import functools
import math
import re
from typing import NamedTuple

import jax

from geojax.hlo.module import (
    Computation,
    HloParseError,
    Instruction,
    Module,
    parse_module,
    shape_sizes,
)
from geojax.hlo.traffic import program_text
from geojax.hlo.trip_count import trip_count

_CONTRACTED = re.compile(r"lhs_contracting_dims=\{([0-9,]*)\}")
_CONTRACTED_BY_LIBRARY = re.compile(r'"lhs_contracting_dimensions": ?\[([^\]]*)\]')
_LIBRARY = re.compile(r'custom_call_target="__(?:cublas|onednn)[^"]*matmul')
_ATTENTION = re.compile(r'custom_call_target="__cudnn\$fmha')
_BATCHED = re.compile(r'lhs_batch_dims=\{[0-9]|"lhs_batch_dimensions": ?\["')


class ProductFlops(NamedTuple):
    """FLOPs of the products with weights that a device runs."""

    flops: int
    unknown_loops: tuple[str, ...]
    """Names of the loops around products whose length is data of the run, such as the blocks of
    tokens that came to an expert; one iteration of each is counted."""


def product_flops(
    program: jax.stages.Compiled | str, *, longest_loop: int | None = None
) -> ProductFlops:
    """Count the FLOPs of the products with weights that a device runs.

    Args:
        program: compiled, or its text.
        longest_loop: as for `geojax.hlo.collective_traffic`.

    Raises:
        HloParseError: the text of the program cannot be read.
    """
    module = parse_module(program_text(program))
    counter = _Counter(module, longest_loop)
    flops = counter.of(module.entry)
    return ProductFlops(flops, tuple(counter.unknown_loops))


class _Counter:
    def __init__(self, module: Module, longest_loop: int | None) -> None:
        self._module = module
        self._longest_loop = longest_loop
        self.unknown_loops: list[str] = []
        self.of = functools.cache(self._of)
        self.holds_attention = functools.cache(self._holds_attention)

    def _of(self, name: str) -> int:
        """Count the FLOPs of one run of the computation `name`."""
        computation = self._module.computations.get(name)
        if computation is None:
            return 0
        return sum(self._of_instruction(computation, each) for each in computation)

    def _of_instruction(self, computation: Computation, instruction: Instruction) -> int:
        if instruction.opcode == "dot" or _LIBRARY.search(instruction.tail):
            return _flops(computation, instruction)
        if instruction.opcode.endswith(("-done", "-update")):
            return 0  # names the computation that its -start has named
        called = [self.of(name) for name in instruction.calls]
        if not any(called):
            return 0
        if instruction.opcode == "conditional":
            fused = [self.of(name) for name in instruction.calls if self.holds_attention(name)]
            return max(fused or called)
        times: int | None = 1
        if instruction.opcode == "while":
            times = trip_count(self._module, computation, instruction)
            times = self._longest_loop if times is None else times
        if times is None:
            self.unknown_loops.append(instruction.name)
            times = 1
        return times * sum(called)

    def _holds_attention(self, name: str) -> bool:
        computation = self._module.computations.get(name)
        return computation is not None and any(
            _ATTENTION.search(each.tail) or any(map(self.holds_attention, each.calls))
            for each in computation
        )


def _flops(computation: Computation, product: Instruction) -> int:
    """Count the FLOPs of a product: two for each number of the result and contracted position."""
    if _BATCHED.search(product.tail):
        return 0
    found = _CONTRACTED.search(product.tail) or _CONTRACTED_BY_LIBRARY.search(product.tail)
    if found is None:
        raise HloParseError(f"HLO text: {product.name} does not say which dims it contracts")
    dims = [int(dim.strip('" ')) for dim in found[1].split(",") if dim]
    factor = shape_sizes(computation.instructions[product.operands[0]].shape)
    return 2 * math.prod(shape_sizes(product.shape)) * math.prod(factor[dim] for dim in dims)
