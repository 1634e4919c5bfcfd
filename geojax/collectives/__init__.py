"""Collectives over two kinds of axes, inside a site and between sites, usable in any shard_map."""

from geojax.collectives.hierarchical import (
    all_gather,
    hierarchical_all_reduce,
    hierarchical_reduce_scatter,
)

__all__ = [
    "all_gather",
    "hierarchical_all_reduce",
    "hierarchical_reduce_scatter",
]
