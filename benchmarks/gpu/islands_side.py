"""One of two sites that are processes of their own, each with half of a GPU's memory."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from geojax_side import FOREVER, single_documents
from work import OPTIMIZER, answer, peak_resident_bytes, text, time_blocks

from geojax.config.layout import Layout
from geojax.config.layout_sections import BatchSettings
from geojax.islands.actions import (
    Add,
    Reduce,
    breadth_first,
    data_actions,
    fetched_ahead,
    own_shares,
    sent,
)
from geojax.islands.programs.site_part import SitePart, even_chunks
from geojax.islands.programs.site_programs import SitePrograms
from geojax.islands.programs.values import StepInputs
from geojax.islands.recording import Recorded
from geojax.islands.site_state import site_layouts
from geojax.islands.walk import Walk
from geojax.job.island_env import IslandSettings
from geojax.mesh import make_mesh
from geojax.models import ModelConfig, parameter_count
from geojax.optim import OptimizerSettings, learning_rate_schedule, make_optimizer
from geojax.pipeline.schedule import Action
from geojax.precision import policy
from geojax.runtime import apply_xla_flags
from geojax.runtime.xla_flags import expected_platform
from geojax.step.plan import StepPlan
from geojax.step.program import batch_on_mesh, batch_shape, signals_on_mesh
from geojax.transport import Membership, connect, streams_for

SITES = ("east", "west")
CHUNKS = 4
LINK_BYTES_PER_SECOND = 10e9


def measure(work: dict[str, Any]) -> dict[str, Any]:
    """Train this site's share, and time the actions of one step more."""
    site, model = work["site"], ModelConfig(**work["model"])
    mesh = make_mesh(devices=jax.devices()[:1])
    precision, microbatches = policy(work["precision"]), work["microbatches"]
    share = BatchSettings(
        global_batch_size=work["rows"], sequence_length=work["sequence"], microbatches=microbatches
    )
    plan = StepPlan(mesh, precision, Layout(batch=share), islands=len(SITES))
    settings = OptimizerSettings(**OPTIMIZER)
    optimizer = make_optimizer(settings, FOREVER)
    schedule = learning_rate_schedule(settings, FOREVER)
    part = SitePart(model, even_chunks(model, min(CHUNKS, model.num_hidden_layers)))
    layouts = site_layouts(part, optimizer, plan)
    shapes = batch_shape(work["rows"], work["sequence"])
    programs = SitePrograms(part, plan, layouts, optimizer, schedule, shapes)
    order = breadth_first(len(part.chunks), microbatches, work["held"])
    of_sites = own_shares(len(SITES))
    lists = [data_actions(order, each, of_sites) for each in range(len(SITES))]
    ahead = fetched_ahead(lists, site)
    island = IslandSettings(
        site=SITES[site],
        sites=SITES,
        coordinators=(work["coordinator"],),
        key=work["key"],
        address="127.0.0.1",
    )
    members = Membership(island, 0, 1, {})
    streams = streams_for(LINK_BYTES_PER_SECOND)
    transport = connect(members, streams, 8 * parameter_count(model) + (1 << 20))
    walk = Walk(lists[site], ahead, programs, transport)
    state = programs.initial_state(seed=0)
    place = batch_on_mesh(shapes, plan)
    batches = [
        jax.tree.map(lambda leaf, shape: jax.device_put(leaf, shape.sharding), batch, place)
        for batch in map(single_documents, text(work, seed=site))
    ]
    asked = signals_on_mesh(plan)
    signals = jax.device_put(jnp.zeros(asked.shape, asked.dtype), asked.sharding)
    waits: list[float] = []

    def step(number: int, record: list[Recorded] | None = None) -> jax.Array:
        nonlocal state
        inputs = StepInputs(batches[number], state.loss_scale, np.uint32(0), state.step)
        state, metrics = walk.step(state, signals, [inputs], record)
        waits.append(sum(sum(link.wait_seconds.values()) for link in walk.traffic.values()))
        return metrics["loss"]

    measured = time_blocks(work, step, lambda losses: [float(x) for x in jax.device_get(losses)])
    # The second one begins at both sites when the first has ended at both.
    for _ in range(2):
        record: list[Recorded] = []
        jax.block_until_ready(step(0, record))
    transport.drain()
    transport.close()
    memory = jax.devices()[0].memory_stats() or {}
    return measured | {
        "peak_bytes": memory.get("peak_bytes_in_use") or peak_resident_bytes(),
        "sent_bytes": sum(walk.message_bytes(sent).values()),
        "wait_seconds": waits[work["block"] : -2],
        "actions": list(map(_described, record)),
    }


def _described(each: Recorded) -> dict[str, Any]:
    """The times of an action; one that sends or takes a bucket has its name."""
    action = each.action
    times = {"start": each.taken, "end": each.end}
    if isinstance(action, Reduce):
        own = {"name": f"reduce {action.bucket}", "bucket": str(action.bucket)}
        return times | own | {"sent": each.dispatched}
    if isinstance(action, Add):
        own = {"name": f"add {action.bucket}", "bucket": str(action.bucket)}
        return times | own | {"arrived": each.arrivals[0]}
    if isinstance(action, Action):
        return times | {"name": f"{action.kind.name} {action.microbatch} of chunk {action.chunk}"}
    return times | {"name": type(action).__name__.lower()}


if __name__ == "__main__":
    apply_xla_flags(expected_platform())
    answer({"measure": measure})
