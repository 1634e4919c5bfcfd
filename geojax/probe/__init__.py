"""Are the devices, the networks inside the sites and the links between them healthy?

Everything is measured by the processes that would train, the links over TCP sockets of their own.
`probe` measures, `measured_topology` makes of it what the planner, the simulator and training read.
"""

from geojax.probe.context import Places
from geojax.probe.figures import Figures
from geojax.probe.run import CHECKS, Check, probe
from geojax.probe.topology_file import measured_topology, save_topology

__all__ = [
    "CHECKS",
    "Check",
    "Figures",
    "Places",
    "measured_topology",
    "probe",
    "save_topology",
]
