"""The grouped matmul of a mixture of experts on an H100: what XLA makes of each way to write it.

    python benchmarks/grouped_matmul.py --output benchmarks/results/grouped_matmul.json

Three products of a layer's experts (forward, the gradient of the rows and that of the kernels) are
compiled ahead of time for an H100, which needs the extra `aot` and no GPU:

    kernels        Mosaic GPU kernels: `geojax.models.moe.grouped_matmul_mosaic`
    loops          plain JAX, for other GPUs and dtypes: `geojax.models.moe.grouped_matmul_loops`
    ragged dot     `jax.lax.ragged_dot_general`, as XLA lowers it by default
    cuDNN          the same with XLA's flag for cuDNN's grouped products

Read from each program: the multiply-adds of its matrix products, as a multiple of those that are
needed (each row times one kernel); its temporary memory; its loops whose length is known at run
time only, in every turn of which the host waits for the GPU. Nothing is run, so nothing is timed.

Kernels and loops walk the blocks of rows that are used, once: what they multiply is no part of the
HLO, and is what is needed but for the rows that fill up each expert's last block.
"""

import argparse
import importlib.metadata
import json
import math
import platform
import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import rich.box
from jax import lax
from jax.sharding import SingleDeviceSharding
from rich.console import Console
from rich.table import Table

from geojax.errors import UserError
from geojax.hlo.module import Instruction, Module, parse_module
from geojax.models.moe import grouped_matmul_loops, grouped_matmul_mosaic
from geojax.planner.compile_target import gpus
from geojax.runtime.compilation import without_compilation_cache

BLOCK = 256
CUDNN = {"xla_gpu_experimental_use_ragged_dot_fusion": True}
FORWARD = lax.RaggedDotDimensionNumbers((((1,), (1,)), ((), ())), [0], [0])
ROWS_GRADIENT = lax.RaggedDotDimensionNumbers((((1,), (2,)), ((), ())), [0], [0])
KERNELS_GRADIENT = lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), [0], [])

_LENGTHS = re.compile(r"\[([\d,]*)\]")


def products(way: str, kernels_type: Any) -> dict[str, Callable[..., jax.Array]]:
    """Return the three products, of two operands and the experts' sizes."""
    if way in ("ragged dot", "cuDNN"):

        def ragged(numbers: Any) -> Callable[..., jax.Array]:
            return lambda left, right, sizes: lax.ragged_dot_general(left, right, sizes, numbers)

        numbers = (FORWARD, ROWS_GRADIENT, KERNELS_GRADIENT)
        forward, rows_gradient, kernels_gradient = map(ragged, numbers)
    else:
        module: Any = grouped_matmul_mosaic if way == "kernels" else grouped_matmul_loops

        def multiply(contracting: int) -> Callable[..., jax.Array]:
            return lambda rows, kernels, sizes: module.multiply(
                BLOCK, rows, kernels, _ends(sizes), contracting=contracting
            )

        def kernels_gradient(rows: Any, cotangent: Any, sizes: Any) -> jax.Array:
            ends = _ends(sizes)
            return module.kernels_gradient(BLOCK, rows, cotangent, kernels_type, ends)

        forward, rows_gradient = multiply(0), multiply(1)
    return {
        "forward": forward,
        "rows' gradient": rows_gradient,
        "kernels' gradient": kernels_gradient,
    }


def _ends(sizes: jax.Array) -> jax.Array:
    return jnp.cumsum(sizes // BLOCK, dtype=jnp.int32)


def compare(way: str, rows: int, experts: int, inputs: int, outputs: int) -> dict[str, Any]:
    """Compile the three products of `rows` rows and describe the programs."""
    on_gpu = SingleDeviceSharding(gpus(1, 1, 1)[0])

    def array(*shape: int, dtype: Any = jnp.bfloat16) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=on_gpu)

    x, kernels, cotangent = (
        array(rows, inputs),
        array(experts, inputs, outputs),
        array(rows, outputs),
    )
    operands = ((x, kernels), (cotangent, kernels), (x, cotangent))
    found = {}
    for (name, product), pair in zip(products(way, kernels).items(), operands, strict=True):
        sizes = array(experts, dtype=jnp.int32)
        with without_compilation_cache():
            program = (
                jax.jit(product).lower(*pair, sizes).compile(CUDNN if way == "cuDNN" else None)
            )
        module = parse_module(program.as_text())
        memory = program.memory_analysis()
        made = _multiply_adds(module) / (rows * inputs * outputs)
        calls, loops = _calls(module), _loops(module)
        found[name] = {
            "calls": calls,
            "loops_of_unknown_length": loops,
            "multiply_adds_over_needed": None if calls or loops else made,
            "temporary_bytes": memory.temp_size_in_bytes,
        }
    return found


def _multiply_adds(module: Module) -> int:
    """Count those of the program's matrix products, each of which runs once."""
    total = 0
    for computation in module.computations.values():
        for dot in (found for found in computation if found.opcode == "dot"):
            left = _shape(computation.instructions[dot.operands[0]])
            contracted = re.findall(r"\d+", dot.attributes["lhs_contracting_dims"])
            total += math.prod(_shape(dot)) * math.prod(left[int(dim)] for dim in contracted)
    return total


def _shape(instruction: Instruction) -> list[int]:
    found = _LENGTHS.search(instruction.shape)
    assert found is not None, f"{instruction.name} is one array"
    return [int(length) for length in found[1].split(",")]


def _instructions(module: Module, opcode: str) -> list[Instruction]:
    return [
        found
        for computation in module.computations.values()
        for found in computation
        if found.opcode == opcode
    ]


def _calls(module: Module) -> list[str]:
    return [
        call.attributes["custom_call_target"].strip('"')
        for call in _instructions(module, "custom-call")
    ]


def _loops(module: Module) -> int:
    return sum("known_trip_count" not in loop.tail for loop in _instructions(module, "while"))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rows", type=int, default=65536, help="rows of all experts")
    parser.add_argument("--experts", type=int, default=8, help="experts of a GPU")
    parser.add_argument("--inputs", type=int, default=2048)
    parser.add_argument("--outputs", type=int, default=1408)
    parser.add_argument("--output", type=Path, help="also write the result as JSON")
    arguments = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")  # no accelerator is touched

    sizes = {name: getattr(arguments, name) for name in ("rows", "experts", "inputs", "outputs")}
    try:
        results = {
            way: compare(way, **sizes) for way in ("kernels", "loops", "ragged dot", "cuDNN")
        }
    except UserError as error:
        parser.error(str(error))
    versions = {name: importlib.metadata.version(name) for name in ("jax", "jaxlib")}
    table = Table(
        title=f"jax {versions['jax']}, {sizes}", title_justify="left", box=rich.box.HORIZONTALS
    )
    table.add_column("", no_wrap=True)
    for column in ("product", "multiply-adds", "temporary", "loops"):
        table.add_column(column, justify="right", no_wrap=True)
    for way, of_way in results.items():
        for name, of in of_way.items():
            times = of["multiply_adds_over_needed"]
            table.add_row(
                way,
                name,
                "" if times is None else f"{times:.2f}x",
                f"{of['temporary_bytes'] / 1e9:.2f} GB",
                str(of["loops_of_unknown_length"]),
            )
    Console().print(table)
    if arguments.output:
        record = {
            "command": shlex.join(["python", *sys.argv]),
            "python": platform.python_version(),
            "versions": versions,
            "sizes": sizes,
            "results": results,
        }
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
