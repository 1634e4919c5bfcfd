"""What a training step sends between sites: geojax, and the same model under automatic sharding.

    python benchmarks/traffic.py --output benchmarks/results/traffic.json

Three contestants train the same transformer, from the same weights, on the same batch, with AdamW
and clipping by the global norm:

    geojax                      the step of `geojax train`: bucket by bucket, sums inside a site,
                                then across
    jit, replicated state       what people write first: sequences spread over all devices, weights
                                and moments on each of them, XLA places the collectives
    jit, sharded state          the same with weights and moments cut over a site's devices (ZeRO)

Each step is compiled for simulated devices, run twice to see that all contestants have the same
losses, and its collectives are read from the compiled program. XLA for CPUs would merge the sums of
neighboring buckets; that pass is off for all, as geojax turns it off on GPUs. Nothing is timed.

How bytes are counted. A sum of S bytes over n devices travels in a ring: every device hands
2 (n - 1) / n * S bytes to its neighbor (`geojax.hlo.conventions`). The ring of a sum over
`dc` alone has one device of each site, so all that it sends crosses a link. In the ring of a flat
sum, over `dc` and the devices of a site, the order decides which devices have their neighbor in
another site: at best one of each site, at worst all of them.

    busiest device     what a device sends across that has its neighbor in another site
    a site, at best    what its devices send across together, with sites in order around the ring
    a site, at worst   the same, with every neighbor in another site
"""

import argparse
import dataclasses
import functools
import importlib.metadata
import json
import os
import platform
import shlex
import sys
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_disable_hlo_passes=cpu-all-reduce-combiner"
)

import jax
import jax.numpy as jnp
import numpy as np
import optax
import rich.box
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from rich.console import Console
from rich.table import Table

from geojax import make_mesh
from geojax.config.layout import Layout
from geojax.config.layout_sections import BatchSettings, MeshSettings
from geojax.errors import UserError
from geojax.hlo import Traffic, collective_traffic
from geojax.models import (
    ModelConfig,
    init_parameters,
    loss_sum,
    parameter_count,
)
from geojax.models.declaration import kind_by_name
from geojax.optim import OptimizerSettings, learning_rate_schedule, make_optimizer
from geojax.optim.optimizer import decay_weights
from geojax.precision import policy
from geojax.runtime import simulate_devices
from geojax.sharding import leaf_layout
from geojax.step.batches import global_batch, global_signals
from geojax.step.plan import BATCH_AXES, SIGNALS, StepPlan
from geojax.step.program import batch_shape, lower_step
from geojax.step.state import initial_state, state_layouts

RING_KINDS = ("all-reduce", "reduce-scatter", "all-gather")
STEPS, SEED, LOSS_TOLERANCE = 2, 0, 1e-4
SETTINGS = OptimizerSettings(warmup_steps=0)
SCHEDULE = learning_rate_schedule(SETTINGS, STEPS)


@dataclasses.dataclass(frozen=True)
class Work:
    """One comparison."""

    model: ModelConfig
    mesh: Mesh
    microbatches: int
    rows: int
    sequence: int
    bucket_bytes: int

    def batch(self) -> dict[str, np.ndarray]:
        """Random tokens, one document a sequence."""
        shape = (self.rows, self.sequence)
        tokens = np.random.default_rng(SEED).integers(
            self.model.vocab_size, size=(self.rows, self.sequence + 1), dtype=np.int32
        )
        return {
            "tokens": tokens[:, :-1],
            "targets": tokens[:, 1:],
            "loss_mask": np.ones(shape, np.float32),
            "segment_ids": np.ones(shape, np.int32),
            "positions": np.broadcast_to(np.arange(self.sequence, dtype=np.int32), shape),
            "row": np.arange(self.rows, dtype=np.int32),
        }


def geojax_step(work: Work) -> tuple[Traffic, list[float]]:
    settings = BatchSettings(
        global_batch_size=work.rows, sequence_length=work.sequence, microbatches=work.microbatches
    )
    layout = Layout(mesh=MeshSettings(**dict(work.mesh.shape)), batch=settings)
    plan = StepPlan(work.mesh, policy("fp32"), layout, work.bucket_bytes)
    optimizer = make_optimizer(SETTINGS, STEPS)
    layouts = state_layouts(work.model, optimizer, plan)
    shapes = batch_shape(work.rows, work.sequence)
    program = lower_step(layouts, work.model, plan, optimizer, SCHEDULE, shapes).compile()
    state = initial_state(work.model, optimizer, layouts, plan, SEED)
    batch = global_batch(plan, work.rows, range(work.rows), work.batch())
    losses = []
    for _ in range(STEPS):
        signals = global_signals(plan, dict.fromkeys(SIGNALS, False))
        state, metrics = program(state, batch, signals, np.uint32(SEED))
        losses.append(float(metrics["loss"]))
    return collective_traffic(program, work.mesh), losses


def jit_step(work: Work, *, sharded_state: bool) -> tuple[Traffic, list[float]]:
    mesh, model = work.mesh, work.model
    everywhere = NamedSharding(mesh, PartitionSpec())
    optimizer = optax.chain(
        optax.clip_by_global_norm(SETTINGS.clip_norm),
        optax.scale_by_adam(SETTINGS.beta1, SETTINGS.beta2, SETTINGS.epsilon),
        decay_weights(lambda name: SETTINGS.of_leaf(name, kind_by_name(name)).weight_decay),
        optax.scale_by_learning_rate(lambda count: SCHEDULE(count + 1)),
    )

    def mean_loss(weights: Any, microbatches: Any) -> jax.Array:
        loss, count = loss_sum(weights, microbatches, model)
        return loss / count

    def step(state: Any, microbatches: Any) -> tuple[Any, jax.Array]:
        parameters, moments = state
        weights = jax.lax.with_sharding_constraint(parameters, everywhere)

        def accumulate(total: Any, microbatch: Any) -> tuple[Any, None]:
            one = jax.value_and_grad(mean_loss)(weights, microbatch)
            return jax.tree.map(jnp.add, total, one), None

        if work.microbatches == 1:
            only = jax.tree.map(lambda leaf: leaf[0], microbatches)
            loss, gradients = jax.value_and_grad(mean_loss)(weights, only)
        else:
            zero = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, weights))
            total, _ = jax.lax.scan(accumulate, zero, microbatches)
            loss, gradients = jax.tree.map(lambda leaf: leaf / work.microbatches, total)
        updates, moments = optimizer.update(gradients, moments, parameters)
        return (optax.apply_updates(parameters, updates), moments), loss

    def initial(key: jax.Array) -> Any:
        parameters = init_parameters(model, key, jnp.float32)
        return parameters, optimizer.init(parameters)

    def place(leaf: Any) -> NamedSharding:
        """Cut over the devices of a site, where a dimension divides."""
        if not sharded_state or not leaf.shape:
            return everywhere
        data = {"data": mesh.shape["data"]}
        layout = leaf_layout(leaf.shape, leaf.dtype, data, stacked=len(leaf.shape) > 2)
        divides = layout.padded_shape == layout.shape
        return NamedSharding(mesh, layout.spec()) if divides else everywhere

    places = jax.tree.map(place, jax.eval_shape(initial, jax.random.key(SEED)))
    state = jax.jit(initial, out_shardings=places)(jax.random.key(SEED))
    rows = NamedSharding(mesh, PartitionSpec(None, BATCH_AXES))
    microbatches = jax.device_put(
        {  # [rows, ...] -> [microbatch, rows of one, ...]
            name: leaf.reshape(work.microbatches, -1, *leaf.shape[1:])
            for name, leaf in work.batch().items()
        },
        rows,
    )
    program = (
        jax.jit(step, donate_argnums=0, out_shardings=(places, everywhere))
        .lower(state, microbatches)
        .compile()
    )
    losses = []
    for _ in range(STEPS):
        state, loss = program(state, microbatches)
        losses.append(float(loss))
    return collective_traffic(program, mesh), losses


GEOJAX = "geojax"
CONTESTANTS: dict[str, Callable[[Work], tuple[Traffic, list[float]]]] = {
    GEOJAX: geojax_step,
    "jit, replicated state": functools.partial(jit_step, sharded_state=False),
    "jit, sharded state": functools.partial(jit_step, sharded_state=True),
}


def across_sites(traffic: Traffic, mesh: Mesh) -> dict[str, int | float]:
    """What crosses links in one step; bytes as the module's documentation defines them."""
    devices_of_site = mesh.size // mesh.shape["dc"]
    crossing = traffic.over("dc")
    at_best = at_worst = Fraction(0)
    for collective in crossing:
        assert collective.kind in RING_KINDS, f"{collective.kind} does not travel in a ring"
        in_one_site = collective.ranks // mesh.shape["dc"]  # members of a ring
        rings = devices_of_site // in_one_site
        at_best += collective.bytes_sent * rings
        at_worst += collective.bytes_sent * rings * in_one_site
    return {
        "collectives": sum(collective.executions for collective in crossing),
        "of_these_in_loops": sum(c.executions for c in crossing if c.in_loop),
        "bytes_of_busiest_device": _number(traffic.bytes_over("dc")),
        "bytes_of_site_at_best": _number(at_best),
        "bytes_of_site_at_worst": _number(at_worst),
    }


def compare(work: Work) -> dict[str, Any]:
    found = {name: contestant(work) for name, contestant in CONTESTANTS.items()}
    losses = {name: losses for name, (_, losses) in found.items()}
    for name in CONTESTANTS:
        if not np.allclose(losses[name], losses[GEOJAX], rtol=0, atol=LOSS_TOLERANCE):
            raise SystemExit(f"the contestants do not train the same model, losses are {losses}")
    return {
        "mesh": {axis: work.mesh.shape[axis] for axis in ("dc", "data")},
        "microbatches": work.microbatches,
        "losses": losses,
        "contestants": {
            name: across_sites(traffic, work.mesh) for name, (traffic, _) in found.items()
        },
    }


def show(console: Console, results: list[dict[str, Any]], title: str) -> None:
    table = Table(title=title, title_justify="left", box=rich.box.HORIZONTALS)
    table.add_column("contestant", no_wrap=True)
    for heading in ("sums\nacross", "busiest\ndevice", "\na site", "times\ngeojax"):
        table.add_column(heading, justify="right", no_wrap=True)
    for result in results:
        own = result["contestants"][GEOJAX]["bytes_of_site_at_best"]
        table.add_section()
        table.add_row(
            "[bold]{dc} sites x {data}, {microbatches}".format(
                **result["mesh"], microbatches=_microbatches(result["microbatches"])
            )
        )
        for name, row in result["contestants"].items():
            site = [row["bytes_of_site_at_best"], row["bytes_of_site_at_worst"]]
            table.add_row(
                f"  {name}",
                str(row["collectives"]),
                f"{row['bytes_of_busiest_device'] / 1e6:.3g}",
                _range(*(f"{value / 1e6:.3g}" for value in site)),
                _range(*(f"{value / own:.2g}" for value in site)),
            )
    console.print(table)
    console.print(
        "Busiest device: one whose neighbor in the ring is in another site. A site: all its "
        "devices, from the best order of the ring (site after site) to the worst (each neighbor "
        "in another site). Times geojax: of a site. Under jit, XLA sums the gradient of each layer "
        "and microbatch as it comes, inside their loops, and that of a tied embedding twice.",
        style="dim",
    )


def _microbatches(count: int) -> str:
    return "1 microbatch" if count == 1 else f"{count} microbatches"


def _range(best: str, worst: str) -> str:
    return best if best == worst else f"{best} to {worst}"


def _layout(text: str) -> tuple[int, int]:
    sizes = [int(size) if size.isdecimal() else 0 for size in text.split("x")]
    if len(sizes) != 2 or sizes[0] < 2 or sizes[1] < 1:
        raise argparse.ArgumentTypeError(f"'{text}' is no layout of two sites or more, such as 2x4")
    return sizes[0], sizes[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="tiny", help="a preset or a YAML file")
    parser.add_argument(
        "--layouts",
        nargs="+",
        type=_layout,
        default=[(2, 4), (4, 2)],
        help="sites x devices of a site, such as 2x4",
    )
    parser.add_argument("--microbatches", nargs="+", type=int, default=[1, 4], help="of a step")
    parser.add_argument("--bucket-bytes", type=int, default=4 * 2**20, help="of geojax")
    parser.add_argument("--sequence", type=int, default=64, help="tokens of a sequence")
    parser.add_argument("--output", type=Path, help="also write the result as JSON")
    arguments = parser.parse_args()

    try:
        model = ModelConfig.load(arguments.model)
    except UserError as error:
        parser.error(str(error))
    simulate_devices(max(dc * data for dc, data in arguments.layouts))
    console = Console()
    results = []
    with console.status("compiling ...") as status:
        for dc, data in arguments.layouts:
            mesh = make_mesh(dc=dc, data=data, devices=jax.devices()[: dc * data])
            for microbatches in arguments.microbatches:
                status.update(f"compiling {dc} x {data}, {_microbatches(microbatches)} ...")
                work = Work(
                    model=model,
                    mesh=mesh,
                    microbatches=microbatches,
                    rows=dc * data * microbatches,
                    sequence=arguments.sequence,
                    bucket_bytes=arguments.bucket_bytes,
                )
                results.append(compare(work))
    parameters = parameter_count(model)
    show(
        console,
        results,
        f"{arguments.model}: {parameters / 1e6:.1f}M parameters, {parameters * 4 / 1e6:.1f} MB of "
        "float32 gradients.\nMegabytes across links in one step:",
    )
    if arguments.output:
        record = {
            "command": shlex.join(["python", *sys.argv]),
            "python": platform.python_version(),
            "versions": {
                name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "optax")
            },
            "model": arguments.model,
            "parameters": parameters,
            "bucket_bytes": arguments.bucket_bytes,
            "results": results,
        }
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(json.dumps(record, indent=1) + "\n")


def _number(value: Fraction) -> int | float:
    return int(value) if value.denominator == 1 else float(value)


if __name__ == "__main__":
    main()
