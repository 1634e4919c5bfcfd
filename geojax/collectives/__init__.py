"""Collectives over two kinds of axes, inside a site and between sites, usable in any shard_map.

The operations are in `hierarchical`, the formulas of what they send in `expected`; and
`collective_traffic` reads from a compiled program what it really sends.
"""

from geojax.collectives.expected import (
    PhaseBytes,
    expected_all_gather,
    expected_all_reduce,
    expected_reduce_scatter,
)
from geojax.collectives.hierarchical import (
    all_gather,
    hierarchical_all_reduce,
    hierarchical_reduce_scatter,
)
from geojax.collectives.order import after
from geojax.collectives.traffic import Collective, Traffic, collective_traffic

__all__ = [
    "Collective",
    "PhaseBytes",
    "Traffic",
    "after",
    "all_gather",
    "collective_traffic",
    "expected_all_gather",
    "expected_all_reduce",
    "expected_reduce_scatter",
    "hierarchical_all_reduce",
    "hierarchical_reduce_scatter",
]
