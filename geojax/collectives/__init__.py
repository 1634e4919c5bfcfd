"""Collectives over two kinds of axes, inside a site and between sites, usable in any shard_map.

`reduction` holds the sums and their three phases, `tree_buckets` the way back from shards,
`wire_format` the formats in which numbers may cross between sites.
"""

from geojax.collectives.order import after, barrier, token_of
from geojax.collectives.reduction import (
    Reduction,
    all_reduce,
    reduce_scatter,
    start_all_reduce,
    start_reduce_scatter,
)
from geojax.collectives.tree_buckets import all_gather
from geojax.collectives.wire_format import BFLOAT16, FLOAT32, INT8, WireFormat, wire_format

__all__ = [
    "BFLOAT16",
    "FLOAT32",
    "INT8",
    "Reduction",
    "WireFormat",
    "after",
    "all_gather",
    "all_reduce",
    "barrier",
    "reduce_scatter",
    "start_all_reduce",
    "start_reduce_scatter",
    "token_of",
    "wire_format",
]
