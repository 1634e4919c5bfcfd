"""A run on one site of several, each a JAX runtime of its own: its programs, walk and trainer."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import jax
import numpy as np

from geojax.config.run_config import RunConfig
from geojax.errors import RunError
from geojax.islands.actions import SiteAction, fetched_ahead, forward_actions
from geojax.islands.agreement import Agreement
from geojax.islands.exchange import Exchange
from geojax.islands.going_on.handing_over import HandedBytes, bytes_in_process, handed_part
from geojax.islands.going_on.returning import catch_up, rehearse, take_state
from geojax.islands.going_on.site_membership import SiteMembership
from geojax.islands.going_on.steps import SharedStep, run_step
from geojax.islands.island_plan import island_plan, own_stages, site_parts
from geojax.islands.programs.site_programs import SitePrograms
from geojax.islands.programs.site_sums import SumsOfSites
from geojax.islands.programs.values import StepInputs
from geojax.islands.recording import Recorded
from geojax.islands.site_state import (
    SiteState,
    join_stages,
    saved_layouts,
    saved_whole_layouts,
    site_layouts,
    split_stages,
)
from geojax.islands.site_walks import SiteWalks
from geojax.islands.stage_lists import action_lists, validation_lists
from geojax.islands.stage_numbers import of_all_stages
from geojax.islands.stage_transport import between_sites, stage_transports
from geojax.islands.walk import Walk
from geojax.membership.record import MembershipRecord
from geojax.models import parameter_count, parameter_kinds
from geojax.models.transformer import tables_of_head
from geojax.optim import make_optimizer
from geojax.pipeline.schedule import Placement
from geojax.quantities import quantity
from geojax.sharding import bytes_per_device, leaf_layouts
from geojax.step.batches import global_batch, global_signals, sequences_of_process
from geojax.step.plan import SIGNALS, StepPlan
from geojax.step.resolved import Step
from geojax.step.stage_layers import staged_layers
from geojax.step.state import TrainState, with_own_sites
from geojax.train.islands.recorded_step import RecordedStep
from geojax.train.islands.run_walks import walks_of_batch, walks_of_run
from geojax.train.islands.site_links import SiteLinks, exchange_of
from geojax.train.islands.time_outs import rate_text
from geojax.train.runtime import Batch, OtherBatches, SaveName
from geojax.train.services import DrawTimeline
from geojax.train.whole_weights import gather_full_params, ungathered_reason
from geojax.train.writing.background_writer import Put, write_at_once
from geojax.transport import Transport

UPDATE_NAME = SumsOfSites.apply.__name__
"""The name of the compiled update, the last program of a step, in the count of compilations."""

_TABLE = "embedding"


@dataclasses.dataclass(frozen=True)
class IslandRun:
    """A config on one of several sites: a `geojax.train.runtime.Runtime`."""

    config: RunConfig
    """The run of all sites."""
    resolved: Step
    """Its choices."""
    plan: StepPlan
    """The step of this one."""
    transport: Transport
    """The way to the other sites."""
    exchange: Exchange
    """Exchange of a few numbers with the other sites."""
    stages: SiteWalks
    """The walk of each stage of the site in this process; in role data there is one."""
    links: SiteLinks
    """The links to the other sites."""
    optimizer: Any
    draw_timeline: DrawTimeline | None
    """Function that draws a recorded step beside the simulated one; None: nothing is drawn."""
    validation: SiteWalks
    """Walks of a full batch, which validate; `stages` where these are of a full batch too."""
    parts: Sequence[TrainState]
    """The `LeafLayout` of each leaf of each site's part, as checkpoints have it."""
    table_sites: Sequence[int] = ()
    """The sites that hold a tied table; () if one does."""
    log: Callable[[str], None] = print
    """Function that shows a line to the user."""
    put: Put = write_at_once
    """Function that takes pictures to be drawn and written."""
    membership: SiteMembership | None = None
    """Who takes part, where sites go on without one that is lost; None: all, or the run ends."""

    @classmethod
    def build(
        cls,
        config: RunConfig,
        resolved: Step,
        plan: StepPlan,
        transport: Transport,
        draw_timeline: DrawTimeline | None = None,
        log: Callable[[str], None] = print,
        put: Put = write_at_once,
        *,
        sequences: int | None = None,
        before: "IslandRun | None" = None,
        membership: SiteMembership | None = None,
    ) -> Self:
        """Compile the programs of one site of `config`.

        Args:
            config: the run of all sites.
            resolved: its choices.
            plan: from `island_plan`.
            transport: joins this process to those that hold other stages, in all sites.
            draw_timeline: draws a recorded step beside the simulated one; None: nothing is drawn.
            log: shows a line to the user.
            put: takes pictures to be drawn and written.
            sequences: those of a batch, a size of `batch.ramp`; None: the full batch.
            before: run of the same processes that this one goes on from: its messages come after
                those, on the same transports; None: there is none.
            membership: who takes part, where sites go on without one that is lost.
        """
        model, is_stage = config.model, config.dc.role == "stage"
        sites, count, own_numbers = config.mesh.dc, config.mesh.stage, own_stages(plan.mesh)
        parts = site_parts(config, resolved)
        optimizer = make_optimizer(config.optimizer, config.steps, parameter_kinds(config.model))
        walked: Sequence[Walk | None] = [None] * len(own_numbers)
        transports = stage_transports(transport, len(own_numbers))
        if before is not None:
            walked = before.stages.walks
            transports = [walk.transport for walk in before.stages.walks]
        validation = walks_of_run(config, resolved, plan, transports, walked)
        stages = validation
        if sequences is not None and sequences != config.batch.global_batch_size:
            stages = walks_of_batch(config, resolved, validation, plan.mesh, sequences)
        table_sites = []
        if is_stage:
            of_sites = [parts[first : first + count] for first in range(0, len(parts), count)]
            saved = [saved_layouts(each, optimizer, plan) for each in of_sites]
            if model.head_reads_tokens:
                table_sites = [site for site, each in enumerate(saved) if _TABLE in each.parameters]
        else:
            layouts = validation.walks[0].programs.layouts
            saved = [saved_whole_layouts(layouts, plan, site) for site in range(sites)]
        to_sites = between_sites(transport, sites)
        return cls(
            config,
            resolved,
            plan,
            to_sites,
            exchange_of(to_sites, "numbers", membership) if before is None else before.exchange,
            stages,
            SiteLinks.of(to_sites, stages, plan.mesh, config.adapt.interval, membership),
            optimizer,
            draw_timeline,
            validation,
            saved,
            table_sites,
            log,
            put,
            membership,
        )

    @property
    def sequences(self) -> int:
        """Sequences of a step's batch, over all sites; a batch of validation is a full one."""
        walked = self.stages.walks[0].programs.plan.layout.batch
        return self.config.batch.sequences_of(walked.microbatches)

    def initial_state(self) -> SiteState:
        """Return the state before the first step, with random weights."""
        return SiteState(tuple(each.initial_state(self.config.seed) for each in self._programs))

    def begin(self, record: MembershipRecord, step: int) -> str:
        """Take part in the run from the step after this one on, in sites that go on without others.

        All sites call it together.

        Returns:
            The name of the run's saves, which a site that returns needs.
        """
        assert self.membership is not None, "sites go on"
        name = self.exchange.random_name(self.plan.mesh)  # while the site that draws it is there
        (programs,) = self._programs
        self.membership.begin(record, programs.sums, saved=step, last_step=self.config.steps)
        return name

    def take_state(self, state: SiteState, batch: Batch, save_name: str) -> SiteState:
        """Take the state of the sites that go on without this one, which returns.

        Before that the programs of a step and of a validation are compiled, so that nobody waits
        for them.

        Args:
            state: the state before the first step.
            batch: this process's sequences of any batch.
            save_name: the name of the run's saves.

        Raises:
            RunError: a site that takes part is lost.
        """
        assert self.membership is not None, "sites go on"
        self.exchange.adopt_name(save_name)
        (walk,), (programs,), (own,) = self.stages.walks, self._programs, state.stages
        signals = global_signals(self.plan, dict.fromkeys(SIGNALS, False))
        (inputs,) = self._inputs(state, batch, self.sequences)
        if self.sequences == self.config.batch.global_batch_size:
            self._validated(state, [inputs])
        self.agreement.rehearse(self.as_saved(state).parameters)
        rehearsed = rehearse(walk, own, signals, inputs)
        taken = take_state(self.membership, programs, rehearsed, self.config.steps)
        return SiteState((taken,))

    def catch_up(self, state: SiteState, come_to: Callable[[int], None]) -> SiteState:
        """Do what the others have done since `take_state`, tell `come_to` each step, take part."""
        assert self.membership is not None, "sites go on"
        (programs,), (own,) = self._programs, state.stages
        return SiteState((catch_up(self.membership, programs, own, come_to),))

    def as_saved(self, state: SiteState) -> TrainState:
        """Return the site's state as its checkpoint has it."""
        return join_stages(state, self.layouts, self.plan.mesh)

    def from_saved(self, saved: TrainState) -> SiteState:
        """Divide the site's state, as its checkpoint has it, among its stages."""
        layouts, meshes = zip(
            *((each.layouts, each.plan.mesh) for each in self._programs), strict=True
        )
        return split_stages(saved, layouts, meshes, self.plan.mesh)

    def agree_on_save(self, step: int, saved: TrainState) -> SaveName:
        """Check that sites hold the same weights where they should, and name their save.

        Raises:
            RunError: some sites hold other weights.
        """
        if differing := self._differing_sites(step, saved):
            sites = ", ".join(map(str, differing))
            raise RunError(
                f"step {step}: the weights of site {sites} are not those of site 0 "
                "(counted from 0), because a device or a link is broken. Nothing is saved. Check "
                "the hosts (geojax probe) and resume from the newest checkpoint"
            )
        name = self.exchange.random_name(self.plan.mesh)
        return SaveName(name, self._membership_id)

    @property
    def _batch_share(self) -> float:
        """Part of the batch that the sites which take part have computed."""
        assert self.membership is not None, "sites go on"
        shares = self.membership.shares_of(self.membership.record)
        return sum(map(len, shares)) / len(shares)

    @property
    def _membership_id(self) -> int | None:
        """Record under which the last step was done; None: all sites always take part."""
        return None if self.membership is None else self.membership.record.membership_id

    def step(
        self,
        state: SiteState,
        batch: Batch,
        requests: Mapping[str, bool],
        others: OtherBatches | None = None,
    ) -> tuple[SiteState, dict[str, jax.Array]]:
        """Run a step on this process's sequences, but for its end; the state is donated."""
        inputs = self._inputs(state, batch, self.sequences)
        none = dict.fromkeys(requests, False)
        signals = [
            global_signals(each.plan, none if stage else requests)
            for stage, each in enumerate(self._programs)
        ]
        recorded = self.stages.walks[0].steps + 1 == self.config.dc.timeline_step
        records: list[list[Recorded] | None] = [[] if recorded else None for _ in inputs]
        if self.membership is None:
            made = self.stages.side_by_side(
                lambda number, walk: walk.step(
                    state.stages[number], signals[number], [inputs[number]], records[number]
                )
            )
        else:
            assert others is not None, "shares of sites that are lost are computed too"
            step = SharedStep(
                self.membership.begun_at + self.stages.walks[0].steps + 1,
                lambda shares: action_lists(
                    self.config.of_batch(self.sequences),
                    self.resolved.of_batch(self.sequences),
                    shares,
                ),
                lambda site: self._of_site(site, inputs[0], state, others, self.sequences),
            )
            self.exchange.number_from(step.number)
            (walk,), (own,) = self.stages.walks, state.stages
            made = [run_step(self.membership, walk, step, own, signals[0], records[0])]
            self.links.recount()
            self._tell_first_rates()
        if recorded:
            recorded_step = RecordedStep(
                self.config.of_batch(self.sequences),
                self.resolved.of_batch(self.sequences),
                self.stages,
                self.exchange,
                self.plan.mesh,
            )
            recorded_step.draw(
                [record for record in records if record is not None],
                self.draw_timeline,
                self.transport,
                self.log,
                self.put,
            )
        self.links.tell_rates()
        metrics = dict(made[0][1])
        if self._membership_id is not None:
            metrics["membership_id"] = np.int64(self._membership_id)
            metrics["batch_share"] = np.float64(self._batch_share)
        return SiteState(tuple(next_state for next_state, _ in made)), metrics

    def _tell_first_rates(self) -> None:
        """Say once how fast the links are, where no topology does: after a window of steps."""
        steps = self.stages.walks[0].steps
        if self.config.topology is None and steps in (1, 1 + self.links.interval):
            pause = self.config.islands.join_pause
            for site, (_, rate) in self.links.measured().items():
                if rate is not None and steps > 1:  # the first step is no measure
                    text = rate_text(rate, "measured", self.handed_bytes, pause)
                    self.log(f"link to {site}: {text}")

    @property
    def handed_bytes(self) -> HandedBytes:
        """The bytes that this site hands to one that returns."""
        (programs,) = self._programs
        state = handed_part(leaf_layouts.abstract(programs.layouts, self.plan.mesh))
        of_process = map(bytes_in_process, (state, programs.sums))
        return HandedBytes(*(jax.process_count() * size for size in of_process))

    @property
    def _programs(self) -> list[SitePrograms]:
        """The programs of each stage of the site in this process."""
        return [walk.programs for walk in self.stages.walks]

    def replanned(self, step: Step) -> Self | None:
        """Compile another step of the same run and mesh; None: its program is this one's.

        In role data buckets are chunks, so that only their compression can change; in role stage
        the order of the work can.
        """
        plan = island_plan(self.config, step.layout, self.plan.mesh)
        same_order = step.pipeline == self.resolved.pipeline and step.sites == self.resolved.sites
        if plan.makes_program_of(self.plan) and same_order:
            return None
        return self.build(
            self.config,
            step,
            plan,
            self.transport,
            self.draw_timeline,
            self.log,
            self.put,
            sequences=self.sequences,
            before=self,
        )

    def of_batch(self, sequences: int) -> Self:
        """Make the programs of batches of so many sequences: a size of the ramp, or the full one.

        Their first step compiles them.
        """
        mesh = self.plan.mesh
        stages = walks_of_batch(self.config, self.resolved, self.stages, mesh, sequences)
        return dataclasses.replace(self, stages=stages, links=self.links.of_walks(stages))

    def adopt(self, state: SiteState) -> SiteState:
        """Return the state of a run that this one was planned anew from."""
        if not self.holds_all:
            return state
        (whole,) = state.stages
        return SiteState((with_own_sites(whole, self._programs[0].layouts, self.plan),))

    def evaluate(self, state: SiteState, batch: Batch, others: OtherBatches | None = None) -> Any:
        """Return [sum of losses, number of targets] of a batch, over all sites."""
        sequences = self.config.batch.global_batch_size
        inputs = self._inputs(state, batch, sequences)
        of_sites = self.exchange.of_hosts(self._validated(state, inputs), self.plan.mesh)
        if self.membership is not None:
            assert others is not None, "shares of sites that are lost are computed too"
            for site in set(range(self.transport.sites)) - set(of_sites):
                of_site = self._of_site(site, inputs[0], state, others, sequences)
                of_sites[site] = self._validated(state, [of_site])
        return sum(of_sites[site] for site in sorted(of_sites))

    def _validated(self, state: SiteState, inputs: Sequence[StepInputs]) -> np.ndarray:
        """Return [sum of losses, number of targets] of a site's sequences of a batch."""
        sums = self.validation.side_by_side(
            lambda number, walk: walk.validation_sums(
                *self._forwards[walk.transport.site], state.stages[number], inputs[number]
            )
        )
        by_number = dict(zip(self.stages.numbers, map(np.asarray, sums), strict=True))
        of_site: np.ndarray = of_all_stages(by_number, self.plan.mesh).sum(axis=0)
        return of_site

    @functools.cached_property
    def _forwards(self) -> dict[int, tuple[Sequence[SiteAction], Mapping[int, int]]]:
        """The actions of a validation, and the messages to fetch ahead, by stage."""
        if self.holds_all:
            alone = Placement(1, (0,) * len(self._programs[0].part.chunks))
            actions = forward_actions(alone, self.plan.layout.batch.microbatches, 0)
            return {self.transport.site: (actions, {})}
        staged = staged_layers(self.resolved.layout)
        assert staged is not None, "sites in role stage are stages of a pipeline"
        lists = validation_lists(staged.placement, self.plan.layout.batch.microbatches)
        numbers = [walk.transport.site for walk in self.stages.walks]
        return {stage: (lists[stage], fetched_ahead(lists, stage)) for stage in numbers}

    def _inputs(self, state: SiteState, batch: Batch, sequences: int) -> list[StepInputs]:
        """Return the arguments of a step of each stage, for a batch of so many sequences."""
        seed = np.uint32(self.config.seed)
        count = self.config.of_batch(sequences).of_one_stage.batch.global_batch_size
        return [
            StepInputs(_on_mesh(each.plan, batch, count), own.loss_scale, seed, own.step)
            for each, own in zip(self._programs, state.stages, strict=True)
        ]

    def _of_site(
        self, site: int, own: StepInputs, state: SiteState, others: OtherBatches, sequences: int
    ) -> StepInputs:
        """Return the arguments for the share of a site, by those for this one's own."""
        if site == self.transport.site:
            return own
        (inputs,) = self._inputs(state, others(site), sequences)
        return inputs

    @property
    def layouts(self) -> TrainState:
        """The `LeafLayout` of each leaf of the site's state in a checkpoint."""
        return self.parts[self.transport.site]

    @property
    def holds_all(self) -> bool:
        """True if each site holds the whole model, in role data."""
        return self._programs[0].part.holds_all

    def _differing_sites(self, step: int, state: TrainState) -> list[int]:
        """List the sites whose weights are not those of others that hold them too."""
        if self.holds_all:
            return self.agreement.differing_sites(step, state.parameters)
        if len(self.table_sites) < 2:
            return []
        return self.agreement.differing_sites(step, self._table(state.parameters))

    @functools.cached_property
    def agreement(self) -> Agreement:
        """The check that sites hold the same weights: all, or a tied table."""
        layouts = self.layouts.parameters
        sites: Sequence[int] = range(self.transport.sites)
        if not self.holds_all:
            layouts, sites = self._table(layouts), self.table_sites
        return Agreement(self.exchange, self.plan.mesh, layouts, sites)

    def _table(self, parameters: Any) -> Any:
        """Return the tied table in a tree like the site's parameters; {} if it has none."""
        if _TABLE not in parameters:
            return {}
        return tables_of_head(parameters[_TABLE], self.config.model)

    def whole_weights(self, state: SiteState) -> Any:
        """Return the weights in the compute dtype, unsharded, on process 0's first device."""
        weights = state.stages[0].evaluated_weights
        return gather_full_params(weights, self.layouts.parameters, self.plan)

    def ungathered_reason(self) -> str | None:
        """Say why this site writes no sample; None: it does.

        All sites would write the same, so the first one that takes part does.
        """
        if not self.holds_all:
            return "each site holds only some of the layers"
        first = 0 if self.membership is None else self.membership.record.members[0]
        if self.transport.site != first:
            name = self.transport.site_names[first]
            return f"that is for site {name}, which has the same weights"
        return ungathered_reason(self.config.model, self.layouts, self.plan)

    @property
    def fp8_programs(self) -> list[jax.stages.Compiled]:
        """The programs of a layer whose products XLA is to make in FP8; none on another backend."""
        if self.plan.fp8_backend != "xla":
            return []
        matmul, layers = self.plan.matmul, self.config.model.num_stacked_layers
        return next(
            (
                programs.compiled_passes(chunk)
                for programs in self._programs
                for chunk, own in programs.part.chunks.items()
                if any(span.recipe for _, span in matmul.spans_within(own, layers))
            ),
            [],
        )

    def describe(self) -> list[str]:
        """Return the lines that open a run: the layout of this site, and what it sends."""
        transport = self.transport
        parameters = quantity(parameter_count(self.config.model))
        layouts = [each.layouts for each in self._programs]
        held = f"in {len(self._programs[0].part.chunks)} buckets"
        if not self.holds_all:
            first, count = transport.site * self.config.mesh.stage, self.config.mesh.stage
            parts = site_parts(self.config, self.resolved)[first : first + count]
            layouts = [site_layouts(part, self.optimizer, self.plan) for part in parts]
            layers, whole = sum(part.layers for part in parts), self.config.model.num_stacked_layers
            held = f"for {layers} of {whole} layers, schedule {self.config.pipeline.schedule}"
        state_bytes = quantity(max(map(bytes_per_device, layouts)), "B")
        return [
            f"site {transport.site} of {transport.sites}, a runtime of its own: "
            f"{parameters} parameters; {state_bytes} of state per device",
            f"a step of a site: {self.links.sent} {held}",
            *self.resolved.notes,
        ]


def _on_mesh(plan: StepPlan, batch: Batch, count: int) -> dict[str, jax.Array]:
    """Put this process's share of the `count` sequences of its site on the mesh."""
    return global_batch(plan, count, sequences_of_process(plan, count), batch)
