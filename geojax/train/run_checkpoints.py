"""The checkpoints of a run: where its sites keep them, and the metadata of each."""

from typing import Any

from jax.sharding import Mesh

import geojax
from geojax.checkpoint import Checkpointer, RunDirectory
from geojax.config.run_config import RunConfig
from geojax.islands.stage_transport import between_sites
from geojax.mesh import site_names
from geojax.models import OwnModel
from geojax.topology import Topology
from geojax.train.islands.site_saves import SiteSaves
from geojax.train.services import Log
from geojax.transport import Transport


def open_checkpoints(
    config: RunConfig,
    directory: RunDirectory,
    mesh: Mesh,
    topology: Topology | None,
    log: Log,
    transport: Transport | None,
) -> Checkpointer:
    """Open the checkpoints of a run; with a transport its sites save parts of their own."""
    sites, own, held = None, None, None
    if transport is not None:
        to_sites = between_sites(transport, config.mesh.dc)
        sites, own = to_sites.site_names, to_sites.site_names[to_sites.site]
        held = SiteSaves(to_sites, mesh, takes_over=config.islands.goes_on)
    elif config.checkpoint.per_site:
        sites = site_names(mesh, topology)
    links = topology.links if topology is not None else ()
    bandwidths = [link.towards(site).bytes_per_second for link in links for site in link.sites]
    return Checkpointer(
        directory.checkpoints,
        mesh,
        sites=sites,
        island=own,
        saves_of_sites=held,
        keep=config.checkpoint.keep,
        interval=config.checkpoint.interval,
        interval_minutes=config.checkpoint.interval_minutes,
        link_bytes_per_second=min(bandwidths, default=None),
        report=log,
    )


def run_metadata(config: RunConfig, data: str) -> dict[str, Any]:
    """Return what a checkpoint says of its run; `data` is the fingerprint of the loader."""
    own = {"module_digest": config.model.digest} if isinstance(config.model, OwnModel) else {}
    return own | {
        "model": config.model.model_dump(mode="json"),
        "data": data,
        "config": config.model_dump(mode="json"),
        "version": geojax.__version__,
    }
