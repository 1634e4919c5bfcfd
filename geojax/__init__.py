"""Train transformers on accelerators that sit in more than one data center.

The names below are the stable interface; each is imported from where it lives when it is first
used, so that `import geojax` starts neither JAX nor a device.
"""

from typing import TYPE_CHECKING

from geojax.lazy_names import importer

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
    from geojax.trainer import Trainer

__all__ = [
    "Pipeline",
    "Schedule",
    "Topology",
    "Trainer",
    "WireFormat",
    "all_gather",
    "all_reduce",
    "collective_traffic",
    "make_mesh",
    "reduce_scatter",
    "start_all_reduce",
]

__version__ = "0.1.0"

_NAMES = {
    "geojax.collectives": "WireFormat all_gather all_reduce reduce_scatter start_all_reduce",
    "geojax.hlo": "collective_traffic",
    "geojax.mesh": "make_mesh",
    "geojax.pipeline": "Schedule",
    "geojax.pipeline.facade": "Pipeline",
    "geojax.topology": "Topology",
    "geojax.trainer": "Trainer",
}


__getattr__ = importer(__name__, _NAMES)


def __dir__() -> list[str]:
    """List the stable names beside the module's own."""
    return sorted({*globals(), *__all__})
