"""The parts of a run that stay open: devices, data, directory, other sites and checkpoints."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
from jax.sharding import Mesh

from geojax import runtime
from geojax.checkpoint import Checkpointer, RunDirectory
from geojax.config.run_config import RunConfig
from geojax.data import Corpus, Loader
from geojax.data.site_batches import SiteBatches
from geojax.data.verification import verify
from geojax.islands.going_on.member_transport import MemberTransport
from geojax.islands.going_on.site_membership import SiteMembership
from geojax.islands.island_plan import island_plan, make_site_mesh, sequences_of_site
from geojax.job.cluster_env import ProcessSettings
from geojax.job.island_env import IslandSettings
from geojax.mesh import leads_site
from geojax.run_paths import CHECKPOINTS
from geojax.step.batches import sequences_of_process
from geojax.step.config_plan import make_run_mesh, step_plan
from geojax.step.plan import StepPlan
from geojax.step.resolved import Step
from geojax.topology import Topology
from geojax.train.events import EventKind
from geojax.train.islands.membership import membership_of
from geojax.train.joined_sites import joined_sites
from geojax.train.run_checkpoints import open_checkpoints
from geojax.train.run_trackers import RunTrackers
from geojax.train.services import Log, Services
from geojax.train.writing.background_writer import BackgroundWriter
from geojax.transport import Transport
from geojax.transport.connect import Joined


@dataclasses.dataclass(frozen=True)
class OpenedRun:
    """The parts of a run that a process keeps open until its end."""

    mesh: Mesh
    """The devices of this runtime."""
    plan: StepPlan
    topology: Topology | None
    corpus: Corpus
    loader: Loader
    site_batches: SiteBatches
    """Batches of other sites, for islands that go on without them."""
    directory: RunDirectory
    files: BackgroundWriter
    """The writer of the run's files."""
    trackers: RunTrackers | None
    """The trackers, on the first process."""
    watchdog: runtime.Watchdog
    joined: Joined | None
    """This site and all others, where they are islands."""
    membership: SiteMembership | None
    """Who takes part, where the others go on without a lost site."""
    transport: Transport | None
    """The transport to the other sites, where they are islands."""
    checkpointer: Checkpointer


@contextlib.contextmanager
def opened_run(
    config: RunConfig,
    step: Step,
    services: Services | None,
    island: IslandSettings | None,
    processes: ProcessSettings,
    *,
    log: Log,
    tell: Callable[[EventKind, int, str], None],
    shows_progress: bool,
    returns: bool,
) -> Iterator[OpenedRun]:
    """Open data, directory, writers and checkpoints, and join the sites; close all at the end.

    Args:
        config: the run of all sites.
        step: its choices.
        services: open builtin data; None: there are none.
        island: place of this process among islands; None: one program runs over all sites.
        processes: complete settings of this process among those of the run.
        log: shows a line to the user.
        tell: shows an event of a step to the user, and notes it.
        shows_progress: this process shows how far long work is.
        returns: the other sites go on without this one, which returns.

    Raises:
        UserError: the config does not fit the devices, the data or the directory.
        RunError: other processes are lost.
    """
    first = jax.process_index() == 0
    with contextlib.ExitStack() as stack:
        topology = config.load_topology()
        mesh, plan, sequences = _placed(config, step, island)
        builtin = None if services is None else services.open_builtin
        corpus = Corpus.open(config.data, builtin, progress=shows_progress)
        loader = open_loader(config, corpus, sequences)
        site_batches = SiteBatches(
            lambda site: open_loader(config, corpus, sequences_of_site(config, plan, site))
        )
        directory = stack.enter_context(_run_directory(config, island))
        if first:
            directory.lock()
        files = stack.enter_context(BackgroundWriter(directory.path, log))
        trackers = None
        if first:
            trackers = stack.enter_context(RunTrackers(config.trackers, directory, files, log))
        # It is left last but for the writers: a hang at the end is one too.
        watchdog = stack.enter_context(runtime.Watchdog(config.watchdog))
        joined: Joined | None = None
        membership: SiteMembership | None = None
        transport: Transport | None = None
        if island is not None:
            contents = corpus.contents
            joined = stack.enter_context(
                joined_sites(config, step, plan, island, processes, contents, returns=returns)
            )
            transport = joined.transport
            watchdog.missing = joined.transport.missing_from_peer
            membership = membership_of(config, joined, processes, tell)
            if membership is not None:
                stack.callback(membership.close)
                watchdog.decides = membership.is_open
                transport = MemberTransport(membership)
        watchdog.begin("start")
        if leads_site(mesh):  # where it fails, the processes of all sites are told
            verify([source.text for source in corpus.sources], progress=shows_progress)
        checkpointer = stack.enter_context(
            open_checkpoints(config, directory, mesh, topology, log, transport)
        )
        yield OpenedRun(
            mesh=mesh,
            plan=plan,
            topology=topology,
            corpus=corpus,
            loader=loader,
            site_batches=site_batches,
            directory=directory,
            files=files,
            trackers=trackers,
            watchdog=watchdog,
            joined=joined,
            membership=membership,
            transport=transport,
            checkpointer=checkpointer,
        )


def own_directory(config: RunConfig, island: IslandSettings | None) -> Path:
    """Return the run's directory, or an island's in it."""
    return config.run_directory if island is None else config.run_directory / island.site


def _placed(
    config: RunConfig, step: Step, island: IslandSettings | None
) -> tuple[Mesh, StepPlan, list[int]]:
    """Return the mesh of this runtime, its step, and the sequences that this process needs."""
    if island is None:
        mesh = make_run_mesh(config)
        plan = step_plan(config, step, mesh)
        return mesh, plan, sequences_of_process(plan, config.batch.global_batch_size)
    mesh = make_site_mesh(config)
    plan = island_plan(config, step.layout, mesh)
    return mesh, plan, sequences_of_site(config, plan, island.sites.index(island.site))


def _run_directory(config: RunConfig, island: IslandSettings | None) -> RunDirectory:
    """Make the run's directory, or an island's, whose checkpoints are parts of the run's.

    Raises:
        UserError: it cannot be made.
    """
    path = own_directory(config, island)
    return RunDirectory(path, None if island is None else config.run_directory / CHECKPOINTS)


def open_loader(config: RunConfig, corpus: Corpus, sequences: list[int]) -> Loader:
    """Open the batches of a run, of which this process reads some sequences."""
    return Loader(
        corpus,
        sequence_length=config.batch.sequence_length,
        global_batch_size=config.batch.global_batch_size,
        sequences=sequences,
        ramp=config.batch.sizes,
        seed=config.seed,
        vocab_size=config.model.vocab_size,
        validation_sequences=config.evaluation.sequences,
        total_sequences=config.batch.sizes.consumed_after(config.steps),
    )
