"""The transport of a run whose sites are jobs of their own."""

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

import geojax
from geojax.config.run_config import RunConfig
from geojax.errors import UserError
from geojax.islands.exchange import Exchange
from geojax.islands.island_plan import process_groups, site_parts, site_programs, stage_meshes
from geojax.islands.programs.site_programs import SitePrograms
from geojax.islands.stage_lists import action_lists, offer_limit_bytes
from geojax.job.cluster_env import VARIABLES as PROCESS_VARIABLES
from geojax.job.cluster_env import ProcessSettings
from geojax.job.island_env import VARIABLES, IslandSettings
from geojax.mesh import index_on_host
from geojax.network_names import LAST_PORT
from geojax.run_paths import STEP
from geojax.settings import leaves_by_key
from geojax.step.plan import StepPlan
from geojax.step.resolved import Step
from geojax.transport import Membership, Streams, Transport, streams_for
from geojax.transport.carrier import Limits
from geojax.transport.connect import Joined, begin, meet_all
from geojax.transport.door import enter

_OF_A_SITE: Any = {
    "run_directory": True,
    "islands": {"lease": True},
    "initial_weights": True,
    "topology": True,
    "simulate_devices": True,
    "data": {"sources": {"__all__": {"prepared"}}, "tokenizer": True, "cache": True},
    "preflight": True,
    "trackers": True,
    "watchdog": True,
    "profile": True,
    "sample": True,
}
"""Keys of the config that each site may have for itself: its paths, and how it is watched."""

HEARTBEAT_VARIABLE = PROCESS_VARIABLES["heartbeat_timeout_seconds"]
_HASH_LETTERS = 12
_BYTES_PER_SECOND = 125e6


def require_sites(config: RunConfig, settings: IslandSettings) -> None:
    """Check that the run has as many sites as its config.

    Raises:
        UserError: it has not.
    """
    if len(settings.sites) != config.mesh.dc:
        raise UserError(
            f"dc.join=islands with mesh.dc={config.mesh.dc} needs as many sites; there are "
            f"{len(settings.sites)}: {', '.join(settings.sites)}"
        )
    if config.islands.goes_on and len(settings.coordinators) < len(settings.sites):
        raise UserError(
            f"islands.on_loss=go_on: {VARIABLES['coordinators']} has one host:port; give that of "
            "process 0 of each site, in the order of the sites, at which a lost site returns"
        )


@contextlib.contextmanager
def joined_sites(
    config: RunConfig,
    step: Step,
    plan: StepPlan,
    settings: IslandSettings,
    processes: ProcessSettings,
    contents: Mapping[str, str],
    *,
    returns: bool = False,
) -> Iterator[Joined]:
    """Join the processes of all sites; at a good end wait until the others have all messages.

    The ends of the transport are the sites, or their stages where these have processes of their
    own (`geojax.islands.island_plan.process_groups`).

    Args:
        config: the run of all sites.
        step: its choices.
        plan: the step of this site.
        settings: this site among them.
        processes: settings of this process; another one has the time that these give it to start,
            and while it runs to give a sign.
        contents: hash of each source of data.
        returns: the others are in a run that goes on without this site.

    Raises:
        UserError: the sites do not fit together.
        MissingProcessesError: some processes did not come in time.
        RunError: another site is lost.
    """
    stages, groups = plan.mesh.shape["stage"], process_groups(plan.mesh)
    shared = shared_settings(config, step.digest, contents) | {
        "number of groups of processes": groups,
        "order of processes": _unusual_order(plan.mesh),
    }
    goes_on = config.islands.goes_on
    if goes_on:  # the sites evict each other after the same time
        shared[HEARTBEAT_VARIABLE] = processes.heartbeat_timeout_seconds
    own = jax.process_index()
    members = Membership(
        settings,
        own,
        jax.process_count(),
        shared,
        groups,
        _own_port(settings),
        [device for device in plan.mesh.devices.flat if device.process_index == own],
    )
    # The devices of a process that hold one stage offer to one other process.
    devices = plan.mesh.size // max(stages, jax.process_count())
    first = dataclasses.replace(plan, mesh=stage_meshes(plan.mesh)[0])
    programs = site_programs(config, site_parts(config, step)[0], first)
    silence_seconds = processes.heartbeat_timeout_seconds
    limits = Limits(
        site_streams(config, settings.site, jax.process_count() // groups),
        _offer_limit(config, step, programs, stages // groups) * devices,
        silence_seconds,
        goes_on,
    )
    joined = begin(members, limits)
    if returns:
        joined = enter(joined, silence_seconds)
    else:
        joined = meet_all(joined, silence_seconds, processes.start_timeout_seconds)
    transport = joined.transport
    try:
        yield joined
        transport.drain()
    except BaseException:
        transport.close(failed=True)
        raise
    transport.close()


def _offer_limit(
    config: RunConfig, step: Step, programs: SitePrograms, stages_per_process: int
) -> int:
    """Return the bytes that a device may have offered to another end, at any size of the batch."""
    sizes = config.batch.sizes
    return max(
        offer_limit_bytes(
            config,
            action_lists(config.of_batch(size), step.of_batch(size)),
            programs,
            stages_per_process,
        )
        for size in (*sizes.smaller, sizes.full)
    )


def _unusual_order(mesh: Mesh) -> list[int] | None:
    """Return the processes of a site in the order of the mesh; None: they are in their own."""
    order = list(dict.fromkeys(device.process_index for device in mesh.devices.flat))
    return None if order == sorted(order) else order


def _own_port(settings: IslandSettings) -> int:
    """Return the port of this process; 0: any."""
    if settings.port is None:
        return 0
    index = index_on_host(jax.process_index())
    if (port := settings.port + index) > LAST_PORT:
        raise UserError(
            f"{VARIABLES['port']}={settings.port}: process {index + 1} of this host has no port; "
            f"give one of at most {LAST_PORT - index}"
        )
    return port


def refuse_other_weights(transport: Transport, mesh: Mesh, digest: str) -> None:
    """Compare the weights that the sites begin with, which each reads from a folder of its own.

    Args:
        transport: joins the sites.
        mesh: this site's devices.
        digest: `geojax.checkpoint.reading.base_weights.fingerprint` of this site's weights.

    Raises:
        UserError: those of another site differ.
    """
    own = np.frombuffer(bytes.fromhex(digest), np.uint32)
    digests = Exchange(transport, "weights").of_hosts(own, mesh)
    for name, other in zip(transport.site_names, digests.values(), strict=True):
        if not np.array_equal(own, other):
            raise UserError(
                f"initial_weights: site {name} has other weights than site "
                f"{transport.site_names[transport.site]}; all sites begin with the same"
            )


def shared_settings(config: RunConfig, digest: str, contents: Mapping[str, str]) -> dict[str, Any]:
    """Return what all sites must have alike, by name.

    They are those of `settings_of_all_sites`, the step, and what the sources of data hold.

    Args:
        config: the run.
        digest: hash of its choices, which the first site has told all others.
        contents: hash of each source of data.
    """
    return {
        **settings_of_all_sites(config),
        STEP: digest,
        "content of data.sources": {
            name: content[:_HASH_LETTERS] for name, content in contents.items()
        },
    }


def settings_of_all_sites(config: RunConfig) -> dict[str, Any]:
    """Return what all sites must have alike before there is a step: versions, devices, config."""
    of_config = dict(leaves_by_key(config.model_dump(mode="json", exclude=_OF_A_SITE)))
    return {
        "geojax version": [geojax.__version__, *of_config],
        **of_config,
        "initial_weights": None if config.initial_weights is None else "a folder",
    }


def site_streams(config: RunConfig, site: str, processes: int) -> Streams:
    """Choose the connections of each process of a site by the slowest link of the site.

    Args:
        config: the run of all sites; without a topology a link is taken for one of 1 Gbit/s.
        site: name of the site.
        processes: processes of the site that a message crosses from at a time.
    """
    topology = config.load_topology()
    links = () if topology is None else topology.links
    rates = [
        link.towards(other).bytes_per_second
        for link in links
        if site in link.sites
        for other in link.sites
    ]
    return streams_for(min(rates, default=_BYTES_PER_SECOND) / processes)
