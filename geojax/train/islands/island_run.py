"""A run on one site of several, each a JAX runtime of its own: its programs, walk and trainer."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import jax
import numpy as np
from jax.sharding import Mesh

from geojax.config.run_config import RunConfig
from geojax.errors import RunError
from geojax.islands.actions import SiteAction, fetched_ahead, forward_actions
from geojax.islands.agreement import Agreement
from geojax.islands.exchange import Exchange
from geojax.islands.going_on.returning import catch_up, rehearse, take_state
from geojax.islands.going_on.site_membership import SiteMembership
from geojax.islands.going_on.steps import SharedStep, run_step
from geojax.islands.island_plan import (
    island_plan,
    own_stages,
    process_groups,
    site_parts,
    site_programs,
    stage_meshes,
)
from geojax.islands.programs.site_programs import SitePrograms
from geojax.islands.programs.site_sums import SumsOfSites
from geojax.islands.programs.values import StepInputs
from geojax.islands.recording import Record, Recorded, as_words, by_one_clock, from_words
from geojax.islands.site_state import (
    SiteState,
    join_stages,
    saved_layouts,
    saved_whole_layouts,
    site_layouts,
    split_stages,
)
from geojax.islands.site_walks import SiteWalks
from geojax.islands.stage_lists import action_lists, data_schedule, validation_lists
from geojax.islands.stage_numbers import of_all_stages
from geojax.islands.stage_transport import between_sites, stage_transports
from geojax.islands.traffic import LinkTraffic
from geojax.islands.walk import Walk
from geojax.membership.record import MembershipRecord
from geojax.models import parameter_count, parameter_kinds
from geojax.models.transformer import tables_of_head
from geojax.optim import make_optimizer
from geojax.pipeline.schedule import Placement
from geojax.quantities import quantity
from geojax.sharding import bytes_per_device
from geojax.step.batches import global_batch, global_signals, sequences_of_process
from geojax.step.plan import SIGNALS, StepPlan
from geojax.step.resolved import Step
from geojax.step.stage_layers import staged_layers
from geojax.step.state import TrainState, with_own_sites
from geojax.topology import Topology
from geojax.train.islands.site_rates import tell_rates, with_told_rates
from geojax.train.links.agreement import LinksOfIslands
from geojax.train.runtime import Batch, OtherBatches, SaveName
from geojax.train.services import DrawTimeline
from geojax.train.whole_weights import gather_full_params, ungathered_reason
from geojax.train.writing.background_writer import Put, write_at_once
from geojax.transport import MeasuredLink, ToldFigures, Transport

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
    stage_bytes: np.ndarray
    """[stages, sites, 2]: bytes of a step from each stage of the site to other sites, and back."""
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
        validation = _walks(config, resolved, plan, transports, walked)
        stages = validation
        if sequences is not None and sequences != config.batch.global_batch_size:
            stages = _walks_of_batch(config, resolved, validation, plan.mesh, sequences)
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
            _exchange(to_sites, "numbers", membership) if before is None else before.exchange,
            stages,
            of_all_stages(stages.link_bytes, plan.mesh),
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

    def catch_up(self, state: SiteState) -> SiteState:
        """Do the steps that the others have done since `take_state`, and take part."""
        assert self.membership is not None, "sites go on"
        (programs,), (own,) = self._programs, state.stages
        return SiteState((catch_up(self.membership, programs, own),))

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
            np.copyto(self.stage_bytes, of_all_stages(self.stages.link_bytes, self.plan.mesh))
        if recorded:
            self._draw([record for record in records if record is not None])
        if self._groups > 1:
            self._tell_rates()
        metrics = dict(made[0][1])
        if self._membership_id is not None:
            metrics["membership_id"] = np.int64(self._membership_id)
            metrics["batch_share"] = np.float64(self._batch_share)
        return SiteState(tuple(next_state for next_state, _ in made)), metrics

    def _draw(self, records: Sequence[Record]) -> None:
        """Draw a recorded step, in role stage with the records of all sites."""
        sites, own = self.transport.site_names, self.transport.site
        count = self.config.mesh.stage
        if self.config.dc.role == "data":
            schedule = data_schedule(self.stages.walks[0].actions)
            names = [sites[own]]
        else:
            pipeline = self.resolved.of_batch(self.sequences).pipeline
            assert pipeline is not None, "sites in role stage are stages"
            schedule = pipeline.as_schedule
            records = self._of_all_sites(records)
            names = [
                f"{site}.{stage}" if count > 1 else site for site in sites for stage in range(count)
            ]
        draw_timeline = self.draw_timeline
        if draw_timeline is None or jax.process_index() != 0:
            return
        folder = self.config.run_directory / sites[own]
        image, trace = folder / "timeline.png", folder / "timeline.json"
        named = dict(zip(names, records, strict=True))
        step = self.stages.walks[0].steps

        def draw() -> None:
            measured, simulated = draw_timeline(schedule, named, image, trace, count)
            self.log(
                f"step {step} after the start, {quantity(measured, 's')} and simulated "
                f"{quantity(simulated, 's')}, is drawn in {image} and {trace}"
            )

        self.put(image.name, draw)

    def _of_all_sites(self, records: Sequence[Record]) -> list[Record]:
        """Exchange the records of a step: those of all stages, by the clock of the first one."""
        config, step = self.config.of_batch(self.sequences), self.resolved.of_batch(self.sequences)
        lists, count = action_lists(config, step), self.config.mesh.stage
        words = dict(zip(self.stages.numbers, as_words(records, lists), strict=True))
        of_site = of_all_stages(words, self.plan.mesh)
        of_stages = [
            record
            for site, each in self.exchange.of_hosts(of_site, self.plan.mesh).items()
            for record in from_words(each, lists[count * site : count * (site + 1)])
        ]
        return by_one_clock(of_stages, count, len(records))

    @property
    def _programs(self) -> list[SitePrograms]:
        """The programs of each stage of the site in this process."""
        return [walk.programs for walk in self.stages.walks]

    @property
    def link_bytes(self) -> np.ndarray:
        """[sites, 2]: the bytes of a step from this site to each other one, and from it."""
        sizes: np.ndarray = self.stage_bytes.sum(axis=0)
        return sizes

    def link_traffic(self) -> Mapping[str, LinkTraffic]:
        """Return the traffic of the last step with each other site, by name."""
        names, traffic = self.transport.site_names, self.stages.traffic
        sockets = self.transport.socket_figures()
        made = {}
        for site in self.transport.counters:
            sent, received = map(int, self.link_bytes[site])
            made[names[site]] = dataclasses.replace(
                traffic.get(site, LinkTraffic()),
                sent_bytes=sent,
                received_bytes=received,
                sockets=sockets.get(site),
            )
        return made

    def exchange_figures(self, figures: bytes) -> Mapping[str, ToldFigures]:
        """Tell the counterparts in the other sites figures; return their newest, by site."""
        told = {}
        for site in self.transport.counters:
            self.transport.tell(site, figures)
            if (newest := self.transport.told(site)) is not None:
                told[self.transport.site_names[site]] = newest
        return told

    @property
    def planned_wait(self) -> None:
        """Nothing: the waits are measured."""

    def measured_links(self) -> Mapping[str, MeasuredLink]:
        """Return what was measured of the link to each other site since the last call, by name.

        Each process knows the rate of its own messages; the others that hold the same stages send
        as many at the same time.
        """
        names, together = self.transport.site_names, jax.process_count() // self._groups
        links = self._own_links()
        if self._groups > 1:
            links = with_told_rates(links)
        return {
            names[site]: link._replace(
                bytes_per_second=link.bytes_per_second and together * link.bytes_per_second
            )
            for site, link in links.items()
        }

    def _tell_rates(self) -> None:
        """Tell the first process what this one measures, if it is the first that holds a stage."""
        process, together = jax.process_index(), jax.process_count() // self._groups
        is_due = self.stages.walks[0].steps % self.config.adapt.interval == 0
        if process > 0 and process % together == 0 and is_due:
            tell_rates(self._own_links())

    def _own_links(self) -> dict[int, MeasuredLink]:
        """Return the links as this process measures them: rates of the stages that send most."""
        busiest, own = self.stage_bytes[:, :, 0].argmax(axis=0), self.stages.numbers
        return {
            site: link if busiest[site] in own else link._replace(bytes_per_second=None)
            for site, link in self.transport.measured().items()
        }

    @functools.cached_property
    def _groups(self) -> int:
        """Groups of the site's processes that hold the same stages."""
        return process_groups(self.plan.mesh)

    def link_agreement(self, topology: Topology) -> LinksOfIslands:
        """Return the agreement on links that have changed, which each site times for itself."""
        names = tuple(self.transport.site_names)
        exchange = _exchange(self.transport, "links", self.membership)
        return LinksOfIslands(exchange, self.plan.mesh, names)

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
        stages = _walks_of_batch(self.config, self.resolved, self.stages, mesh, sequences)
        sizes = of_all_stages(stages.link_bytes, mesh)
        return dataclasses.replace(self, stages=stages, stage_bytes=sizes)

    def adopt(self, state: SiteState) -> SiteState:
        """Return the state of a run that this one was planned anew from."""
        if not self.holds_all:
            return state
        (whole,) = state.stages
        return SiteState((with_own_sites(whole, self._programs[0].layouts, self.plan),))

    def link_lines(self) -> list[str]:
        """Return what the log says of the messages between sites."""
        return [f"a step of a site: {self._sent}"]

    @property
    def _sent(self) -> str:
        return f"predicted {quantity(self.sent_bytes, 'B')} over dc"

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
    def sent_bytes(self) -> float:
        """Bytes of a step's messages to other sites."""
        return float(self.link_bytes[:, 0].sum())

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
            f"a step of a site: {self._sent} {held}",
            *self.resolved.notes,
        ]


def _exchange(transport: Transport, kind: str, membership: SiteMembership | None) -> Exchange:
    """Return an exchange of all sites, or of those that take part."""
    if membership is None:
        return Exchange(transport, kind)
    return Exchange(transport, kind, membership.agreed)


def _on_mesh(plan: StepPlan, batch: Batch, count: int) -> dict[str, jax.Array]:
    """Put this process's share of the `count` sequences of its site on the mesh."""
    return global_batch(plan, count, sequences_of_process(plan, count), batch)


def _walks(
    config: RunConfig,
    resolved: Step,
    plan: StepPlan,
    transports: Sequence[Transport],
    before: Sequence[Walk | None],
) -> SiteWalks:
    """Make the walks of this process's stages; each goes on from the one before, if there is one.

    Args:
        config: the run of all sites.
        resolved: its choices, for the batch of `config`.
        plan: the step of the site.
        transports: joins each of the stages to those of other sites.
        before: walks over the same transports.
    """
    parts, lists = site_parts(config, resolved), action_lists(config, resolved)
    walks, meshes = [], stage_meshes(plan.mesh)
    for number, stage, last in zip(own_stages(plan.mesh), transports, before, strict=True):
        on_stage = dataclasses.replace(plan, mesh=meshes[number])
        programs = site_programs(config, parts[stage.site], on_stage)
        ahead = fetched_ahead(lists, stage.site)
        walks.append(Walk(lists[stage.site], ahead, programs, stage, last))
    return SiteWalks(walks, config.mesh.stage)


def _walks_of_batch(
    config: RunConfig, resolved: Step, before: SiteWalks, mesh: Mesh, sequences: int
) -> SiteWalks:
    """Make the walks of batches of so many sequences, which go on from those of other batches."""
    step = resolved.of_batch(sequences)
    plan = island_plan(config, step.layout, mesh)
    transports = [walk.transport for walk in before.walks]
    return _walks(config.of_batch(sequences), step, plan, transports, before.walks)
