"""Health and speed of the devices, the networks inside the sites and the links between them.

The processes that would train measure everything, the links over TCP sockets of their own. `probe`
measures, and `measured_topology` turns the figures into a topology for the planner, the simulator
and training.
"""

from geojax.probe.context import ProbeContext
from geojax.probe.figures import Figures
from geojax.probe.run import CHECKS, Check, probe
from geojax.probe.topology_file import measured_topology, save_topology

__all__ = [
    "CHECKS",
    "Check",
    "Figures",
    "ProbeContext",
    "measured_topology",
    "probe",
    "save_topology",
]
