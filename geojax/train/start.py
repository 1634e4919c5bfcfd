"""The start of this process's part of a run: its place among sites, its devices, JAX's settings."""

import os
from typing import NamedTuple

import jax

from geojax import runtime
from geojax.cache import cache_folder
from geojax.config.run_config import RunConfig
from geojax.job.cluster_env import ProcessSettings, complete
from geojax.job.island_env import IslandSettings, island_settings
from geojax.topology import Process
from geojax.trackers.tracker_settings import refuse_unusable
from geojax.train.joined_sites import require_sites
from geojax.train.report import mesh_line


class Started(NamedTuple):
    """The place of this process in a run that has come together."""

    everyone: tuple[Process, ...]
    """The processes of this runtime, by their index."""
    island: IslandSettings | None
    """This process's site among islands; None in one program."""
    why_no_cache: str | None
    """Reason why compiled programs are not kept; None: they are."""
    mesh_line: str
    """Mesh and devices of this runtime, in words."""


def start(config: RunConfig, processes: ProcessSettings) -> Started:
    """Bring the processes of a run together, before the first JAX operation.

    Raises:
        UserError: the site is none of the topology's, the run has other sites than its config, or
            what a tracker needs is not installed.
        MissingProcessesError: some process did not start in time.
    """
    completed, topology = complete(processes, os.environ), config.load_topology()
    site = completed.site
    if not completed.process_id:  # the first process of a run tracks it
        refuse_unusable(config.trackers)
    if site is not None and topology is not None:
        topology.site(site)  # refuses a name that it does not know
    island = None
    if config.dc.join == "islands":
        island = island_settings(os.environ, processes.site)
        require_sites(config, island)
    everyone = runtime.start(processes)
    why_no_cache = runtime.enable_compilation_cache(cache_folder() / "xla")
    jax.config.update("jax_enable_x64", config.precision == "fp64")
    sizes = config.mesh.model_dump() | ({} if island is None else {"dc": 1})
    return Started(everyone, island, why_no_cache, mesh_line(sizes, jax.devices()))
