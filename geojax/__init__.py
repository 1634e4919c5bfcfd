"""Train transformers on accelerators that sit in more than one data center.

The names below are the stable interface; each is imported from where it lives when it is first
used, so that `import geojax` starts neither JAX nor a device.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from geojax.collectives import (
        WireFormat,
        all_gather,
        all_reduce,
        reduce_scatter,
        start_all_reduce,
    )
    from geojax.hlo import collective_traffic
    from geojax.mesh import make_mesh
    from geojax.pipeline import Schedule
    from geojax.pipeline.facade import Pipeline
    from geojax.topology import Topology

__all__ = [
    "Pipeline",
    "Schedule",
    "Topology",
    "WireFormat",
    "all_gather",
    "all_reduce",
    "collective_traffic",
    "make_mesh",
    "reduce_scatter",
    "start_all_reduce",
]

__version__ = "0.1.0"

_MODULES = {
    "Pipeline": "geojax.pipeline.facade",
    "Schedule": "geojax.pipeline",
    "Topology": "geojax.topology",
    "WireFormat": "geojax.collectives",
    "all_gather": "geojax.collectives",
    "all_reduce": "geojax.collectives",
    "collective_traffic": "geojax.hlo",
    "make_mesh": "geojax.mesh",
    "reduce_scatter": "geojax.collectives",
    "start_all_reduce": "geojax.collectives",
}


def __getattr__(name: str) -> Any:
    """Import a stable name from its module when it is first used."""
    if name not in _MODULES:
        raise AttributeError(f"module 'geojax' has no attribute '{name}'")
    value = getattr(import_module(_MODULES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """List the stable names beside the module's own."""
    return sorted({*globals(), *__all__})
