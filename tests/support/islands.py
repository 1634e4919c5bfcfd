"""Islands in one process: sites on disjoint meshes of its devices, joined by a loopback."""

import concurrent.futures
import dataclasses
import functools
import math

import jax
import numpy as np
from jax.sharding import PartitionSpec
from support import whole_state
from support.plans import step_plan_on
from support.small_models import ROWS, SEQUENCE

from geojax import make_mesh
from geojax.islands.actions import (
    breadth_first,
    data_actions,
    fetched_ahead,
    own_shares,
    stage_actions,
)
from geojax.islands.programs.site_part import SitePart, even_chunks
from geojax.islands.programs.site_programs import SitePrograms
from geojax.islands.programs.values import StepInputs
from geojax.islands.site_state import site_layouts
from geojax.islands.stage_transport import stage_transports
from geojax.islands.walk import Walk
from geojax.optim import OptimizerSettings, learning_rate_schedule, make_optimizer
from geojax.precision import policy
from geojax.step.batches import global_batch, global_signals, sequences_of_process
from geojax.step.plan import SIGNALS
from geojax.step.program import batch_shape, batch_specs
from geojax.step.state import initial_state, state_layouts
from geojax.step.update import train_step
from geojax.transport import loopback

SETTINGS = OptimizerSettings(warmup_steps=1)
FLOAT64 = policy("fp64")
SEED = 11


class Run:
    """A model under a plan, with its state."""

    def whole(self):
        """The state without padding, on the host."""
        return whole_state.on_host(self.state, self.layouts)

    def on_mesh(self, batch):
        count = len(batch["row"])
        return global_batch(self.plan, count, sequences_of_process(self.plan, count), batch)

    def signals(self):
        return global_signals(self.plan, dict.fromkeys(SIGNALS, True))


class OneProgram(Run):
    """The run in one program."""

    def __init__(self, model, plan):
        self.model, self.plan = model, plan
        self.optimizer = make_optimizer(SETTINGS, 10)
        self.schedule = learning_rate_schedule(SETTINGS, 10)
        self.layouts = state_layouts(model, self.optimizer, plan)
        self.state = initial_state(model, self.optimizer, self.layouts, plan, 3)

    @functools.cached_property
    def program(self):
        specs = jax.tree.map(lambda place: place.spec(), self.layouts)
        step = functools.partial(
            train_step,
            layouts=self.layouts,
            model=self.model,
            plan=self.plan,
            optimizer=self.optimizer,
            schedule=self.schedule,
        )
        batch = batch_specs(batch_shape(1, 1), self.plan)
        mapped = jax.shard_map(
            step,
            mesh=self.plan.mesh,
            in_specs=(specs, batch, self.plan.signal_spec, PartitionSpec()),
            out_specs=(specs, PartitionSpec()),
        )
        return jax.jit(mapped)

    def step(self, batch):
        self.state, metrics = self.program(
            self.state, self.on_mesh(batch), self.signals(), np.uint32(SEED)
        )
        return jax.device_get(metrics)


class Island(Run):
    """One site of a run."""

    def __init__(self, part, plan, shape, lists, transport, settings):
        self.model, self.plan, self.part = part.model, plan, part
        self.optimizer = make_optimizer(settings, 10)
        schedule = learning_rate_schedule(settings, 10)
        self.layouts = site_layouts(part, self.optimizer, plan)
        programs = SitePrograms(part, plan, self.layouts, self.optimizer, schedule, shape)
        self.state = programs.initial_state(3)
        ahead = fetched_ahead(lists, transport.site)
        self.walk = Walk(lists[transport.site], ahead, programs, transport)

    def start_from(self, parameters):
        """Go on with these weights, whole and on the host."""
        placed = whole_state.place(parameters, self.layouts.parameters, self.plan.mesh)
        self.state = dataclasses.replace(self.state, parameters=placed)

    def inputs(self, batch):
        """The arguments of a step for one share."""
        return StepInputs(
            self.on_mesh(batch), self.state.loss_scale, np.uint32(SEED), self.state.step
        )

    def step(self, *batches):
        """One step on the batch of each of the site's shares."""
        inputs = [self.inputs(batch) for batch in batches]
        self.state, metrics = self.walk.step(self.state, self.signals(), inputs)
        return jax.device_get(metrics)


def site_plans(sites, axes, dtypes=FLOAT64, **options):
    """The plan of each site, on devices of its own."""
    count = math.prod(axes.values())
    devices = np.reshape(jax.devices()[: sites * count], (sites, count))
    return [
        step_plan_on(make_mesh(devices=list(own), **axes), dtypes, islands=sites, **options)
        for own in devices
    ]


def data_islands(
    model,
    plans,
    *,
    chunks,
    held,
    of_sites=None,
    rows=ROWS,
    sequence=SEQUENCE,
    settings=SETTINGS,
):
    """Sites in role data that share `rows` sequences evenly, each its own share or `of_sites`."""
    sites = len(plans)
    schedule = breadth_first(chunks, plans[0].layout.batch.microbatches, held)
    lists = [data_actions(schedule, site, of_sites or own_shares(sites)) for site in range(sites)]
    part = SitePart(model, even_chunks(model, chunks))
    shape = batch_shape(rows // sites, sequence)
    return [
        Island(part, plan, shape, lists, transport, settings)
        for plan, transport in zip(plans, loopback(sites), strict=True)
    ]


def stage_islands(
    model, plans, schedule, stages_per_site=1, *, rows=ROWS, sequence=SEQUENCE, settings=SETTINGS
):
    """Stages on islands, which all get all sequences; a plan for each stage."""
    stages, chunks = len(plans), even_chunks(model, schedule.placement.chunks)
    tied = model.head_reads_tokens
    lists = [
        stage_actions(schedule, stage, tied=tied, stages_per_site=stages_per_site)
        for stage in range(stages)
    ]
    transports = [
        transport
        for of_site in loopback(stages // stages_per_site)
        for transport in stage_transports(of_site, stages_per_site)
    ]
    made, shape = [], batch_shape(rows, sequence)
    for stage, (plan, transport) in enumerate(zip(plans, transports, strict=True)):
        own = {chunk: chunks[chunk] for chunk in schedule.placement.chunks_of(stage)}
        made.append(Island(SitePart(model, own), plan, shape, lists, transport, settings))
    return made


def shares(batch, sites):
    """The sequences of each site."""
    of_sites = np.split(np.arange(len(batch["row"])), sites)
    return [{name: leaf[share] for name, leaf in batch.items()} for share in of_sites]


def step_all(islands, batches):
    """One step of all islands, each in a thread of its own, on one batch or several; metrics."""
    x64 = jax.config.jax_enable_x64

    def step(island, batch):
        with jax.enable_x64(x64):
            return island.step(*(batch if isinstance(batch, list) else [batch]))

    with concurrent.futures.ThreadPoolExecutor(len(islands)) as threads:
        return list(threads.map(step, islands, batches))
