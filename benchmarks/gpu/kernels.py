"""The kernels of a GPU beside plain JAX: their errors and their times.

    python benchmarks/gpu/kernels.py

    attention  cuDNN's flash attention as geojax calls it (packed documents, windows, sinks, wide
               heads), and the blocked one in plain JAX; errors are off plain softmax in float32
    experts    the grouped products of a mixture of experts: our Mosaic kernels, loops in plain JAX
               and jax.lax.ragged_dot; errors are off loops in float32
    fp8        a linear layer's three products by each recipe and backend, beside bf16; errors are
               off the same recipe in plain JAX

An error is the norm of the difference over the norm of the reference, the largest of a result and
its gradients. One above its bar ends the benchmark with 1. Without a GPU shapes are small and what
needs one is left out. Needs jax, numpy and pydantic.
"""

import argparse
import contextlib
import json
import platform
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, get_args

import jax
import jax.numpy as jnp
from jax import lax
from timing import first_line, seconds

from geojax.errors import UserError
from geojax.models.attention.api import attention
from geojax.models.moe import grouped_matmul_loops, grouped_matmul_mosaic
from geojax.precision import Backend, LinearMatmul, chosen_backend, policy
from geojax.runtime.xla_flags import FP8_OPTIONS

OUTPUT = Path(__file__).resolve().parent.parent / "results" / "gpu_kernels.json"
ON_GPU = jax.default_backend() == "gpu"

BF16_BAR = 0.01
"""For sums in float32 of bf16 numbers, rounded once or twice."""
FP8_BAR = 0.01
"""For equal FP8 numbers, multiplied by others: rounding to bf16 and fast accumulation."""


def random(key: int, *shape: int, dtype: Any = jnp.bfloat16) -> jax.Array:
    return jax.random.normal(jax.random.key(key), shape, dtype)


def error(made: Any, reference: Any) -> float:
    """Return the largest error of the leaves."""

    def of_leaf(a: jax.Array, b: jax.Array) -> jax.Array:
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
        return jnp.linalg.norm((a - b).ravel()) / jnp.linalg.norm(b.ravel())

    return max(
        float(x)
        for x in jax.tree.leaves(jax.jit(jax.tree.map, static_argnums=0)(of_leaf, made, reference))
    )


def with_gradients(function: Callable[..., jax.Array], cotangent: jax.Array) -> Callable[..., Any]:
    """Return a function to the result of `function` and its gradients in all arguments."""

    def both(*arguments: Any) -> Any:
        made, back = jax.vjp(function, *arguments)
        return made, *back(cotangent.astype(made.dtype))

    return both


def exact(function: Callable[..., Any], *arguments: Any) -> Any:
    """Run `function` in full precision; its kernels are not tuned, which would take long."""
    with jax.default_matmul_precision("highest"):
        lowered = jax.jit(function).lower(*arguments)
    return lowered.compile({"xla_gpu_autotune_level": 0} if ON_GPU else None)(*arguments)


def compare(
    ways: dict[str, Callable[..., Any]],
    arguments: tuple[Any, ...],
    reference: Any,
    flops: float,
    bar: float,
    options: dict[str, dict[str, Any]] | None = None,
) -> dict[str, Any]:
    """Run every way, and time it."""
    found: dict[str, Any] = {}
    for name, way in ways.items():
        try:
            begin = time.perf_counter()
            program = jax.jit(way).lower(*arguments).compile((options or {}).get(name))
            compiling = time.perf_counter() - begin
            off = error(program(*arguments), reference)
            taken = seconds(program, *arguments)
        except Exception as problem:
            found[name] = {"problem": first_line(problem)}
            continue
        found[name] = {
            "error": off,
            "bar": bar,
            "seconds": taken,
            "flops_per_second": flops / taken,
            "compile_seconds": compiling,
        }
    return found


class AttentionCase(NamedTuple):
    """What attention is asked for, of one sequence."""

    heads: int
    kv_heads: int
    dims: int
    value_dims: int
    documents: int | None = None
    """Documents of the sequence; None: the kernel is not told of any."""
    window: int | None = None
    sinks: bool = False

    def pairs(self, sequence: int) -> float:
        """Return the pairs of positions that see each other, with no regard to documents."""
        window = min(self.window or sequence, sequence)
        return sequence * window - window**2 / 2

    def segment_ids(self, sequence: int) -> jax.Array | None:
        """Return the documents' numbers [1, S]; their ends are drawn."""
        if self.documents is None:
            return None
        key, count = jax.random.key(4), self.documents - 1
        ends = jnp.sort(jax.random.choice(key, sequence - 1, (count,), False)) + 1
        number = jnp.sum(jnp.arange(sequence)[None, :, None] >= ends, axis=-1)
        return number.astype(jnp.int32) + 1

    def way(self, implementation: str, sequence: int) -> Callable[..., Any]:
        """Return a function of query, key, value and sinks to the result and its gradients."""
        segment_ids = self.segment_ids(sequence)

        def attend(query: Any, key: Any, value: Any, sinks: Any = None) -> jax.Array:
            return attention(
                query,
                key,
                value,
                segment_ids,
                implementation=implementation,
                window=self.window,
                sinks=sinks,
            )

        return with_gradients(attend, random(5, 1, sequence, self.heads, self.value_dims))


ATTENTION = {
    "causal": AttentionCase(32, 8, 128, 128),
    "one document": AttentionCase(32, 8, 128, 128, documents=1),
    "6 documents": AttentionCase(32, 8, 128, 128, documents=6),
    "20 documents": AttentionCase(32, 8, 128, 128, documents=20),
    "window of 1,024": AttentionCase(32, 8, 128, 128, window=1024),
    "latent, 192 and 128": AttentionCase(16, 16, 192, 128),
    "heads of 256": AttentionCase(16, 8, 256, 256),
    "sinks, window of 128": AttentionCase(64, 8, 64, 64, window=128, sinks=True),
    "sinks, 6 documents": AttentionCase(64, 8, 64, 64, documents=6, sinks=True),
}

Compared: TypeAlias = Iterator[tuple[str, dict[str, Any]]]
"""What is compared, and what each way made of it."""


def attentions(sequence: int) -> Compared:
    """Compare attention in every case; times are of the forward and the backward together."""
    for name, case in ATTENTION.items():
        operands: tuple[jax.Array, ...] = (
            random(0, 1, sequence, case.heads, case.dims),
            random(1, 1, sequence, case.kv_heads, case.dims),
            random(2, 1, sequence, case.kv_heads, case.value_dims),
        )
        if case.sinks:
            operands += (random(3, case.heads),)
        wide = [x.astype(jnp.float32) for x in operands]
        reference = exact(case.way("reference", sequence), *wide)
        names = ["cudnn"] if ON_GPU else []
        if name == "causal" or not ON_GPU:  # it takes a GPU's compiler long
            names.append("blocked")
        ways = {each: case.way(each, sequence) for each in names}
        # A forward, and 2.5 times that backward: as flash attention is counted.
        flops = 3.5 * 2 * case.heads * (case.dims + case.value_dims) * case.pairs(sequence)
        yield name, compare(ways, operands, reference, flops, BF16_BAR)


EXPERTS = {"145B": (65536, 8, 4096, 1024), "671B": (32768, 16, 7168, 2048)}
"""Rows, experts, inputs and outputs of a product."""
BLOCK = 256


def experts(sizes: dict[str, tuple[int, int, int, int]]) -> Compared:
    """Compare the three products of a layer's experts, whose loads differ."""
    for case, (rows, count, inputs, outputs) in sizes.items():
        blocks = rows // BLOCK
        loads = jnp.asarray([(3 * n) % 5 + 1 for n in range(count)], jnp.float32)
        loads = jnp.floor(loads / loads.sum() * blocks * 0.95).astype(jnp.int32)
        ends = jnp.cumsum(loads, dtype=jnp.int32)
        used = (jnp.arange(rows) < ends[-1] * BLOCK)[:, None]
        x = jnp.where(used, random(0, rows, inputs), 0)
        kernels = random(1, count, inputs, outputs)
        change = jnp.where(used, random(2, rows, outputs), 0)
        operands = {
            "forward": (x, kernels),
            "rows' gradient": (change, kernels),
            "kernels' gradient": (x, change),
        }
        for name, pair in operands.items():
            own = _grouped(name, kernels, ends)
            wide = tuple(each.astype(jnp.float32) for each in pair)
            reference = exact(own(grouped_matmul_loops), *wide)
            ways = {"loops": own(grouped_matmul_loops), "ragged dot": _ragged(name, loads)}
            if ON_GPU:
                ways = {"kernels": own(grouped_matmul_mosaic)} | ways
            flops = 2.0 * float(ends[-1]) * BLOCK * inputs * outputs
            yield f"{case} {name}", compare(ways, pair, reference, flops, BF16_BAR)


def _grouped(name: str, kernels: jax.Array, ends: jax.Array) -> Callable[[Any], Callable[..., Any]]:
    """Return a function from a module to its product of that name."""

    def of_module(module: Any) -> Callable[..., Any]:
        if name == "kernels' gradient":

            def gradient(x: jax.Array, change: jax.Array) -> jax.Array:
                like = jax.ShapeDtypeStruct(kernels.shape, x.dtype)
                return module.kernels_gradient(BLOCK, x, change, like, ends)

            return gradient
        contracting = int(name == "rows' gradient")
        return lambda x, kernels: module.multiply(BLOCK, x, kernels, ends, contracting=contracting)

    return of_module


def _ragged(name: str, loads: jax.Array) -> Callable[..., Any]:
    contracted, kept = {
        "forward": ((((1,), (1,)), ((), ())), [0]),
        "rows' gradient": ((((1,), (2,)), ((), ())), [0]),
        "kernels' gradient": ((((0,), (0,)), ((), ())), []),
    }[name]
    numbers = lax.RaggedDotDimensionNumbers(contracted, [0], kept)
    return lambda left, right: lax.ragged_dot_general(left, right, loads * BLOCK, numbers)


def linear_layers(tokens: int, inputs: int, outputs: int) -> Compared:
    """Compare the products of a linear layer by recipe and backend."""
    x, w = random(0, tokens, inputs), random(1, inputs, outputs) / inputs**0.5
    change = random(2, tokens, outputs)
    flops = 6.0 * tokens * inputs * outputs
    plain = with_gradients(LinearMatmul().multiply, change)
    yield "bf16", compare({"xla": plain}, (x, w), jax.jit(plain)(x, w), flops, BF16_BAR)
    amax = jnp.stack([jnp.max(jnp.abs(each)).astype(jnp.float32) for each in (x, w, change)])
    for name in ("fp8-current", "fp8-delayed"):
        recipe = policy(name).recipe
        assert recipe is not None, f"{name} is a recipe"
        ways = {}
        for backend in get_args(Backend):
            with contextlib.suppress(UserError):
                chosen_backend(recipe, jax.default_backend(), backend)
                own = LinearMatmul(recipe, backend).multiply
                past = amax if recipe.history else None
                ways[backend] = with_gradients(
                    lambda x, w, own=own, past=past: own(x, w, past), change
                )
        reference = exact(ways["reference"], x, w)
        options = {"xla": FP8_OPTIONS, "transformer_engine": FP8_OPTIONS} if ON_GPU else None
        yield name, compare(ways, (x, w), reference, flops, FP8_BAR, options)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parts: dict[str, Callable[[], Compared]] = {
        "experts": lambda: experts(EXPERTS if ON_GPU else {"toy": (2048, 4, 64, 128)}),
        "fp8": lambda: linear_layers(*((16384, 4096, 14336) if ON_GPU else (64, 128, 256))),
        "attention": lambda: attentions(4096 if ON_GPU else 256),
    }
    parser.add_argument("--only", nargs="+", choices=parts, help="just these parts")
    parser.add_argument("--output", type=Path, help=f"JSON; default on a GPU: {OUTPUT.name}")
    arguments = parser.parse_args()
    device = jax.devices()[0]
    record: dict[str, Any] = {
        "command": shlex.join(["python", *sys.argv]),
        "device": device.device_kind,
        "versions": {"jax": jax.__version__, "python": platform.python_version()},
    }
    good = True
    print(f"{device.device_kind}: error, us, TFLOP/s and seconds to compile")
    output = arguments.output or (OUTPUT if ON_GPU else None)
    for part in arguments.only or parts:
        record[part] = {}
        for case, ways in parts[part]():
            record[part][case] = ways
            for way, made in ways.items():
                # NaN is no good either.
                good &= "error" in made and made["error"] <= made["bar"]
                print(f"{part + ', ' + case + ': ' + way:55}{_row(made)}", flush=True)
            if output:
                output.parent.mkdir(parents=True, exist_ok=True)
                output.write_text(json.dumps(record, indent=1) + "\n")
    sys.exit(0 if good else 1)


def _row(made: dict[str, Any]) -> str:
    if "problem" in made:
        return str(made["problem"])
    mark = " " if made["error"] <= made["bar"] else "!"
    return (
        f"{made['error']:8.1e}{mark}{1e6 * made['seconds']:10,.0f}"
        f"{made['flops_per_second'] / 1e12:8.1f}{made['compile_seconds']:7.1f}"
    )


if __name__ == "__main__":
    main()
