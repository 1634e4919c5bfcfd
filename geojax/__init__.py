"""geojax: train transformers on accelerators that sit in more than one data centre."""

from geojax.errors import UserError
from geojax.mesh import AXES, make_mesh
from geojax.topology import Topology

__all__ = ["AXES", "Topology", "UserError", "make_mesh"]

__version__ = "0.1.0"
