"""What cutting products costs a GPU: chunks of a region, their order, sums of gradients.

    python benchmarks/gpu/products.py

Products of one layer on a rank of `tensor`, by the shapes of Nemotron-4 340B and Llama 3 70B:

    one against n  a product over all positions, and as n products of a chunk of positions each
    order          the copy that brings gathered chunks back into the order of the sequence
    sum            a weight's gradient alone, with the sum over microbatches, and the sum alone

Beside each product stands what the planner's model says. Whether the compiler adds in the product's
own output is read from its program. Without a GPU the shapes are small, which only shows that the
benchmark works. Needs jax, numpy and pydantic.
"""

import argparse
import json
import platform
import re
import shlex
import sys
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from timing import compiled, seconds, show

from geojax.accelerators import accelerator_of
from geojax.planner.cost.calibration import Calibration
from geojax.planner.cost.matmul import MatmulRate, matmul_rate

OUTPUT = Path(__file__).resolve().parent.parent / "results" / "gpu_products.json"
CHUNKS = (2, 4, 8)
UNMERGED: dict[str, str | bool] = {"xla_gpu_dot_merger_threshold_mb": "0"}
"""Chunks of one region share their weights: the compiler is not to make one product of them."""


class Region(NamedTuple):
    """A product [rows, inner] x [inner, columns] of a rank of `tensor`."""

    rows: int
    inner: int
    columns: int
    gathers: bool
    """Whether its rows are gathered over `tensor` before it (column parallel)."""


TENSOR = 8
LARGE = {
    "340B": {
        "query key value": Region(4096, 18432, 2688, True),
        "attention output": Region(4096, 2304, 18432, False),
        "up": Region(4096, 18432, 9216, True),
        "down": Region(4096, 9216, 18432, False),
    },
    "70B": {
        "query key value": Region(8192, 8192, 1280, True),
        "attention output": Region(8192, 1024, 8192, False),
        "gate up": Region(8192, 8192, 7168, True),
        "down": Region(8192, 3584, 8192, False),
    },
}
SMALL = {"toy": {"up": Region(256, 128, 512, True), "down": Region(256, 512, 128, False)}}


def random(*shape: int, dtype: Any = jnp.bfloat16) -> jax.Array:
    return jax.random.normal(jax.random.key(len(shape)), shape, dtype)


def cut(region: Region, rate: MatmulRate | None) -> dict[str, Any]:
    """Time the product whole and in chunks, and the copies that restore the order."""
    rows, inner, columns, gathers = region
    counts = (1, *CHUNKS)
    shapes = {
        n: (
            tuple(jax.ShapeDtypeStruct((rows // n, inner), jnp.bfloat16) for _ in range(n)),
            jax.ShapeDtypeStruct((inner, columns), jnp.bfloat16),
        )
        for n in counts
    }
    programs = compiled(
        {
            str(n): (lambda parts, weight: [part @ weight for part in parts], shapes[n])
            for n in counts
        },
        UNMERGED if jax.default_backend() == "gpu" else None,
    )
    weight, found = random(inner, columns), {}
    for n in counts:
        program = programs[str(n)]
        if isinstance(program, str):
            found[str(n)] = {"problem": program}
            continue
        parts = tuple(random(rows // n, inner) for _ in range(n))
        found[str(n)] = {
            "seconds": seconds(program, parts, weight),
            "model_seconds": rate and n * rate.seconds(rows // n, columns, inner),
        }
        if gathers and n > 1:
            made = random(n, TENSOR, rows // n // TENSOR, columns)
            restore = jax.jit(lambda x: x.swapaxes(0, 1).reshape(-1, x.shape[-1]))
            found[str(n)]["order_seconds"] = seconds(restore, made)
    return found


def sums(region: Region) -> dict[str, Any]:
    """Time a weight's gradient, with and without the sum over microbatches."""
    rows, inner, columns, _ = region

    def gradient(x: jax.Array, change: jax.Array, dtype: Any) -> jax.Array:
        return jax.lax.dot_general(
            x, change, (((0,), (0,)), ((), ())), preferred_element_type=dtype
        )

    x, change = random(rows, inner), random(rows, columns)
    found: dict[str, Any] = {}
    for name, dtype in (("bfloat16", jnp.bfloat16), ("float32", jnp.float32)):
        total = random(inner, columns, dtype=dtype)
        made = gradient(x, change, dtype)
        programs = {
            "product": jax.jit(lambda x, change, d=dtype: gradient(x, change, d)),
            "product and sum": jax.jit(
                lambda total, x, change, d=dtype: total + gradient(x, change, d), donate_argnums=0
            ),
            "sum": jax.jit(lambda total, made: total + made, donate_argnums=0),
        }
        text = programs["product and sum"].lower(total, x, change).compile().as_text()
        found[name] = {
            "product": seconds(programs["product"], x, change),
            "product and sum": seconds(programs["product and sum"], total, x, change, chained=True),
            "sum": seconds(
                programs["sum"], random(inner, columns, dtype=dtype), made, chained=True
            ),
            "in_the_products_output": bool(re.search(r'"beta":1\b', text)),
            "kernels": sorted(set(re.findall(r'custom_call_target="([^"]+)"', text))),
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--output", type=Path, help=f"JSON; default on a GPU: {OUTPUT.name}")
    parser.add_argument("--models", nargs="+", help="just these models")
    arguments = parser.parse_args()
    device = jax.devices()[0]
    accelerator = accelerator_of(device)
    rate = None
    if device.platform == "gpu" and accelerator is not None:
        calibration = Calibration()
        rate = matmul_rate(
            accelerator,
            "bfloat16",
            calibration.matmul(accelerator, "bfloat16"),
            calibration.memory(accelerator),
        )
    models = LARGE if device.platform == "gpu" else SMALL
    record: dict[str, Any] = {
        "command": shlex.join(["python", *sys.argv]),
        "device": device.device_kind,
        "versions": {
            "jax": jax.__version__,
            "numpy": np.__version__,
            "python": platform.python_version(),
        },
        "models": {},
    }
    for model in arguments.models or models:
        if model not in models:
            parser.error(f"no model is called '{model}'; there are: {', '.join(models)}")
        regions = models[model]
        of_model = record["models"][model] = {}
        for name, region in regions.items():
            of_model[name] = {
                "region": region._asdict(),
                "cut": cut(region, rate),
                "sums": sums(region),
            }
        print_model(f"{model} on {device.device_kind}", of_model)
        if output := arguments.output or (None if models is SMALL else OUTPUT):
            output.parent.mkdir(parents=True, exist_ok=True)
            output.write_text(json.dumps(record, indent=1) + "\n")


def print_model(title: str, of_model: dict[str, Any]) -> None:
    """Print the two tables of a model."""
    rows = []
    for name, measured in of_model.items():
        region = Region(**measured["region"])
        flops = 2 * region.rows * region.inner * region.columns
        whole = measured["cut"]["1"].get("seconds")
        for n, made in measured["cut"].items():
            if "problem" in made:
                rows.append([f"{name}, {n}", made["problem"], "", "", "", ""])
                continue
            model = made["model_seconds"]
            rows.append(
                [
                    f"{name}, {n}",
                    f"{1e6 * made['seconds']:,.0f}",
                    f"{flops / made['seconds'] / 1e12:,.1f}",
                    f"{made['seconds'] / whole:.3f}" if whole else "-",
                    f"{1e6 * model:,.0f}" if model else "-",
                    f"{1e6 * made['order_seconds']:,.0f}" if "order_seconds" in made else "-",
                ]
            )
    show(title, ("product, chunks", "us", "TFLOP/s", "over one", "model us", "order us"), rows)
    rows = [
        [
            f"{name}, {dtype}",
            *(f"{1e6 * made[each]:,.0f}" for each in ("product", "product and sum", "sum")),
            f"{(made['product and sum'] - made['product']) / made['sum']:.2f}",
            "yes" if made["in_the_products_output"] else "no",
        ]
        for name, measured in of_model.items()
        for dtype, made in measured["sums"].items()
    ]
    columns = ("gradient", "product us", "with sum us", "sum us", "shares of sum", "in output")
    show(title, columns, rows)


if __name__ == "__main__":
    main()
