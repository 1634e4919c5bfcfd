"""Start of a run's processes, here or over ssh, so that they end together and leave none behind.

`supervise` runs `Worker`s, each under a reaper of its own (`reaper.py`), and finds out which of
them failed first; `supervise_sites` starts each site that fails again. `local_workers` and
`Hosts.workers` make the workers.
"""

from geojax.launch.hosts import Hosts
from geojax.launch.output import Output
from geojax.launch.supervisor import Outcome, supervise, supervise_sites
from geojax.launch.workers import Worker, as_islands, local_workers

__all__ = [
    "Hosts",
    "Outcome",
    "Output",
    "Worker",
    "as_islands",
    "local_workers",
    "supervise",
    "supervise_sites",
]
