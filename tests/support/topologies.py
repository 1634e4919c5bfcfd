"""Topologies of a few H100 hosts."""

from geojax.topology import Topology


def topology_of(*sites, links=()):
    """A topology of (name, hosts, accelerators per host) each, and links as in YAML."""
    return Topology.model_validate(
        {
            "sites": [
                {
                    "name": name,
                    "hosts": hosts,
                    "accelerators_per_host": per,
                    "accelerator": "h100-sxm",
                }
                for name, hosts, per in sites
            ],
            "links": list(links),
        }
    )
