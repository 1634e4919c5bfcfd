"""Collectives over two kinds of axes, inside a site and between sites, usable in any shard_map.

The operations are in `hierarchical`, the all-reduce in phases in `in_flight`, the formats in which
numbers may cross between sites in `wire_format`.
"""

from geojax.collectives.hierarchical import (
    all_gather,
    all_reduce_with_errors,
    hierarchical_all_reduce,
    hierarchical_reduce_scatter,
    reduce_scatter_with_errors,
)
from geojax.collectives.in_flight import AllReduce, start_all_reduce
from geojax.collectives.order import after
from geojax.collectives.wire_format import BFLOAT16, FLOAT32, INT8, Wire, WireName, wire_format

__all__ = [
    "BFLOAT16",
    "FLOAT32",
    "INT8",
    "AllReduce",
    "Wire",
    "WireName",
    "after",
    "all_gather",
    "all_reduce_with_errors",
    "hierarchical_all_reduce",
    "hierarchical_reduce_scatter",
    "reduce_scatter_with_errors",
    "start_all_reduce",
    "wire_format",
]
