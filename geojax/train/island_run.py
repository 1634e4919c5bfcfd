"""A run on one site of several, each a JAX runtime of its own: its programs, walk and trainer."""

import dataclasses
import functools
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from geojax.accelerators import Accelerator, accelerator_of
from geojax.checkpoint import Checkpointer
from geojax.errors import RunError, UserError
from geojax.islands.actions import breadth_first, data_actions
from geojax.islands.agreement import Agreement
from geojax.islands.programs import SitePrograms, StepBytes
from geojax.islands.recording import Record, Recorded
from geojax.islands.shared_name import SharedName
from geojax.islands.site_part import SitePart, even_chunks
from geojax.islands.site_state import initial_site_state, saved_layouts, site_layouts
from geojax.islands.site_sums import SumsOfSites
from geojax.islands.traffic import LinkTraffic
from geojax.islands.validation import Validation
from geojax.islands.values import StepInputs
from geojax.islands.walk import Walk
from geojax.mesh import make_mesh
from geojax.models import model_flops, parameter_count
from geojax.optim import bytes_per_device, learning_rate_schedule, make_optimizer
from geojax.planner.cross_site import CrossSiteBytes
from geojax.quantities import quantity
from geojax.runtime.device_memory import usable_memory
from geojax.step.plan import StepPlan
from geojax.step.program import batch_shape, trace_evaluation
from geojax.step.state import TrainState, with_own_sites, with_saved_sites
from geojax.train.batches import global_batch, global_signals, sequences_of_process
from geojax.train.compiled_run import step_plan
from geojax.train.config import RunConfig
from geojax.train.island_stages import (
    Lists,
    fetched_ahead,
    stage_costs,
    stage_lists,
    stage_parts,
    validation_lists,
)
from geojax.train.report import mesh_line
from geojax.train.sample import gather_full_params, unsampled_reason
from geojax.train.trainer import Batch, TrainerFacts
from geojax.transport import Transport

UPDATE_NAME = SumsOfSites.apply.__name__
"""The name of the compiled update, the last program of a step, in the count of compilations."""

_AUTO_CHUNKS = 4
"""Buckets of a step: so many that most travel during a backward, so few that they are large."""


def site_config(config: RunConfig) -> RunConfig:
    """Return the config of one site by itself: without `dc`, and with the batch that it gets.

    In role data that is its share, in role stage all of it.
    """
    mesh = config.mesh.model_copy(update={"dc": 1})
    shares = config.mesh.dc if config.dc.role == "data" else 1
    sequences = config.batch.global_batch_size // shares
    batch = config.batch.model_copy(update={"global_batch_size": sequences})
    return config.model_copy(update={"mesh": mesh, "batch": batch})


def make_site_mesh(config: RunConfig, devices: list[jax.Device] | None = None) -> Mesh:
    """Make the mesh of one site of `config`, over the devices of its processes.

    Raises:
        UserError: the layout does not fit the devices.
    """
    return make_mesh(devices=devices, **site_config(config).mesh.model_dump())


def island_plan(config: RunConfig, mesh: Mesh) -> StepPlan:
    """Plan the step of one site of `config` on its mesh.

    Raises:
        UserError: its FP8 backend cannot run there.
    """
    plan = step_plan(site_config(config), mesh)
    return dataclasses.replace(plan, islands=config.mesh.dc, overlap_grad_reduce=False)


def sequences_of_site(config: RunConfig, plan: StepPlan, site: int) -> list[int]:
    """List the sequences of a global batch that the devices of this process need, ascending."""
    count = site_config(config).batch.global_batch_size
    first = site * count if config.dc.role == "data" else 0
    return [first + each for each in sequences_of_process(plan, count)]


@dataclasses.dataclass(frozen=True)
class IslandRun:
    """A config on one of several sites: a `geojax.train.trainer.Trainer`."""

    config: RunConfig
    """The run of all sites."""
    plan: StepPlan
    """The step of this one."""
    layouts: TrainState
    optimizer: Any
    walk: Walk
    parts: Sequence[TrainState] = ()
    """The `LeafLayout` of each leaf of each site's part, in role stage; () in role data."""
    evaluation_program: jax.stages.Compiled | None = None
    """`(state, batch) -> [sum of losses, number of targets]` of a site that holds the whole model;
    None: it does not, or nothing is validated."""
    log: Callable[[str], None] = print
    """Function that shows a line to the user."""

    @classmethod
    def build(
        cls,
        config: RunConfig,
        plan: StepPlan,
        transport: Transport,
        log: Callable[[str], None] = print,
        *,
        validate: bool = False,
    ) -> "IslandRun":
        """Compile the programs of one site of `config`.

        Args:
            config: the run of all sites.
            plan: from `island_plan`.
            transport: joins the sites.
            log: shows a line to the user.
            validate: compile the validation pass too.
        """
        model, is_stage = config.model, config.dc.role == "stage"
        parts = stage_parts(config) if is_stage else [data_part(config)] * transport.sites
        part = parts[transport.site]
        optimizer = make_optimizer(config.optimizer, config.steps)
        schedule = learning_rate_schedule(config.optimizer, config.steps)
        layouts = site_layouts(part, optimizer, plan)
        own = site_config(config).batch
        batch = batch_shape(own.global_batch_size, own.sequence_length)
        programs = SitePrograms(part, plan, layouts, optimizer, schedule, batch)
        lists = stage_lists(config) if is_stage else _data_lists(config, programs)
        ahead = fetched_ahead(lists, transport.site)
        walk = Walk(lists[transport.site], ahead, programs, transport)
        saved, evaluation = [], None
        if is_stage:
            saved = [saved_layouts(each, optimizer, plan) for each in parts]
        elif validate:
            traced = trace_evaluation(layouts, model, plan, batch)
            evaluation = traced.lower().compile(compiler_options=plan.compiler_options)
        return cls(config, plan, layouts, optimizer, walk, saved, evaluation, log)

    def initial_state(self) -> TrainState:
        """Return the state before the first step."""
        part, seed = self.walk.programs.part, self.config.seed
        return initial_site_state(part, self.optimizer, self.layouts, self.plan, seed)

    def step(
        self, state: TrainState, batch: Batch, requests: Mapping[str, bool]
    ) -> tuple[TrainState, dict[str, jax.Array]]:
        """Run a step on this process's sequences, but for its end; the state is donated."""
        inputs, signals = self._inputs(state, batch), global_signals(self.plan, requests)
        recorded = self.walk.steps + 1 == self.config.dc.timeline_step
        record: list[Recorded] | None = [] if recorded else None
        next_state, metrics = self.walk.step(state, signals, inputs, record)
        if record is not None and jax.process_index() == 0:
            self._draw(record)
        return next_state, metrics

    def _draw(self, record: Record) -> None:
        from geojax.islands import step_timeline  # it imports matplotlib

        transport = self.walk.transport
        site = transport.site_names[transport.site]
        folder = self.config.run_directory / site
        image, trace = folder / "timeline.png", folder / "timeline.json"
        schedule = step_timeline.data_schedule(self.walk.actions)
        step_timeline.draw(schedule, {site: record}, image, trace)
        self.log(f"step {self.walk.steps} after the start is drawn in {image} and {trace}")

    def link_traffic(self) -> Mapping[str, LinkTraffic]:
        """Return the traffic of the last step with each other site, by name."""
        names = self.walk.transport.site_names
        return {names[site]: traffic for site, traffic in self.walk.traffic.items()}

    def evaluate(self, state: TrainState, batch: Batch) -> jax.Array:
        """Return [sum of losses, number of targets] of a batch, over all sites."""
        if self.parts:
            return self.validation.sums(state, self._inputs(state, batch))
        assert self.evaluation_program is not None, "a run that validates must be built for it"
        own = self.evaluation_program(state, self._on_mesh(batch))
        return functools.reduce(jnp.add, self.walk.of_all_sites(own))

    @functools.cached_property
    def validation(self) -> Validation:
        """The walk of a validation, in role stage."""
        lists, site = validation_lists(self.config), self.walk.transport.site
        return Validation(self.walk, lists[site], fetched_ahead(lists, site))

    def _inputs(self, state: TrainState, batch: Batch) -> StepInputs:
        seed = np.uint32(self.config.seed)
        return StepInputs(self._on_mesh(batch), state.loss_scale, seed, state.step)

    def _on_mesh(self, batch: Batch) -> dict[str, jax.Array]:
        count = site_config(self.config).batch.global_batch_size
        return global_batch(self.plan, count, sequences_of_process(self.plan, count), batch)

    def save(
        self, checkpointer: Checkpointer, step: int, state: TrainState, metadata: Mapping[str, Any]
    ) -> None:
        """Save what the site's devices hold.

        In role data that is the whole model, and rounding errors of the site; in role stage its
        part, and all sites' folders together are a checkpoint of one program.

        Raises:
            RunError: the sites do not hold the same weights in role data.
        """
        if self.parts:
            checkpointer.run = self.shared_name.get()
            own = self.parts[self.walk.transport.site]
            checkpointer.save(step, state, own, metadata, self.parts)
            return
        if differing := self.agreement.differing_sites(step, state.parameters):
            sites = ", ".join(map(str, differing))
            raise RunError(
                f"step {step}: the weights of site {sites} are not those of site 0 "
                "(counted from 0); a device or a link is broken, nothing is saved; check the hosts "
                "(geojax probe) and go on from the newest checkpoint"
            )
        checkpointer.save(step, state, self.layouts, metadata)

    def restore(
        self, checkpointer: Checkpointer, model: Mapping[str, Any]
    ) -> tuple[TrainState, dict[str, Any]]:
        """Restore the newest checkpoint of this site, or of one program on any number of sites.

        Raises:
            UserError: as in `Trainer.restore`; or the sites' checkpoints are of different steps.
        """
        layouts = self.parts[self.walk.transport.site] if self.parts else self.layouts
        saved, metadata = checkpointer.restore(
            layouts, model=model, adapt=with_saved_sites, parts=self.parts
        )
        steps = [int(step) for step in self.walk.of_all_sites(saved.step)]
        if len(set(steps)) > 1:
            listed = ", ".join(map(str, steps))
            raise UserError(
                f"the newest checkpoints of the sites are of the steps {listed}; remove those "
                f"after step {min(steps)} at the other sites"
            )
        return with_own_sites(saved, self.layouts, self.plan), metadata

    @functools.cached_property
    def shared_name(self) -> SharedName:
        """The name of the run in the checkpoints of all sites, in role stage."""
        return SharedName(self.walk)

    @functools.cached_property
    def agreement(self) -> Agreement:
        """The check that all sites hold the same weights."""
        return Agreement(self.walk)

    def gather_full_params(self, state: TrainState) -> Any:
        """Return the weights in the compute dtype, unsharded, on process 0's first device."""
        return gather_full_params(state.parameters, self.layouts.parameters, self.plan)

    def unsampled_reason(self) -> str | None:
        """Say why the whole model cannot be gathered on one device; None: it can be."""
        if self.parts:
            return "each site holds only some of the layers"
        return unsampled_reason(self.config.model, self.layouts, self.plan)

    @functools.cached_property
    def facts(self) -> TrainerFacts:
        """Facts for the log; a step's bytes are those of its messages."""
        config, mesh = self.config, self.plan.mesh
        accelerator = accelerator_of(mesh.devices.flat[0])
        peak = accelerator and accelerator.peak(self.plan.policy.compute_dtype.name)
        sequence = config.batch.sequence_length
        return TrainerFacts(
            tokens_per_step=config.batch.global_batch_size * sequence,
            flops_per_token=model_flops(config.model, sequence),
            peak_flops=peak * mesh.devices.size * config.mesh.dc if peak else None,
            cross_site=CrossSiteBytes(float(self.walk.sent_bytes)),
        )

    def describe(self) -> list[str]:
        """Return the lines that open a run: the layout of this site, and what it sends."""
        transport, programs = self.walk.transport, self.walk.programs
        parameters = quantity(parameter_count(self.config.model))
        state_bytes = quantity(bytes_per_device(self.layouts), "B")
        held = f"in {len(programs.part.chunks)} buckets"
        if self.parts:
            layers, whole = programs.part.layers, self.config.model.num_hidden_layers
            held = f"for {layers} of {whole} layers, schedule {self.config.pipeline.schedule}"
        return [
            f"site {transport.site} of {transport.sites}, a runtime of its own: "
            f"{mesh_line(self.plan.mesh)}; {parameters} parameters; {state_bytes} of state per "
            "device",
            f"a step of a site: {self.facts.cross_site} {held}",
            *self._unknown_times(),
        ]

    def _unknown_times(self) -> list[str]:
        """Return the line that says why the schedule is made without times; none if it is not."""
        try:
            if self.parts:
                stage_costs(self.config)
        except UserError as unknown:
            return [f"pipeline over dc: nothing is known of its times: {unknown}"]
        return []


def _data_lists(config: RunConfig, programs: SitePrograms) -> Lists:
    """List the actions of each site in role data, with as many microbatches held as fit."""
    plan, sites = programs.plan, config.mesh.dc
    held = held_at_once(config, programs, accelerator_of(plan.mesh.devices.flat[0]))
    order = breadth_first(len(programs.part.chunks), plan.microbatches, held)
    return [data_actions(order, site, sites) for site in range(sites)]


def held_at_once(config: RunConfig, programs: SitePrograms, accelerator: Accelerator | None) -> int:
    """Return how many microbatches a site in role data holds at once; all if there is no limit.

    Args:
        config: the run of all sites.
        programs: the site's.
        accelerator: the kind of its devices; None: not known, as on CPUs.
    """
    held = config.pipeline.memory_limit
    if held is None:
        usable = None if accelerator is None else usable_memory(accelerator, os.environ)
        free = None if usable is None else usable.bytes - bytes_per_device(programs.layouts)
        held = held_microbatches(programs.step_bytes, free)
    return min(held, programs.plan.microbatches)


def held_microbatches(step: StepBytes, free_bytes: int | None) -> int:
    """Return how many microbatches a step can hold at once, at least one.

    Args:
        step: the bytes of a step on each device.
        free_bytes: those that the state leaves free; None: not known, as on CPUs.
    """
    if free_bytes is None:
        return sys.maxsize
    compute = step.of_microbatch  # of a chunk under way, besides what it keeps: at most as much
    return max((free_bytes - step.always - compute) // step.of_microbatch, 1)


def data_part(config: RunConfig) -> SitePart:
    """Divide the model of a run in role data into the chunks that make its buckets."""
    return SitePart(config.model, even_chunks(config.model, _chunks(config)))


def _chunks(config: RunConfig) -> int:
    layers, together = config.model.num_hidden_layers, config.communication.bucket_layers
    return min(layers, _AUTO_CHUNKS) if together == "auto" else math.ceil(layers / together)
