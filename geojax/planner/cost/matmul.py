"""Time of a matrix product by its shape.

A product [M, K] x [K, N] is computed in tiles of the result. Each multiprocessor computes one tile,
and a wave has as many tiles as there are multiprocessors (NVIDIA, "Matrix Multiplication Background
User's Guide", sections on tile and wave quantization). With the peak R of large products and the
bandwidth W of the memory,

    compute    2 M N K / R, with M and N rounded up to whole tiles and the waves to whole waves
    memory     (M K + K N + M N) bytes / W, beside the compute
    drain      the tiles of the last wave are written when there is nothing left to compute
    launch     a few microseconds before the first tile is under way

so that products with few tiles, a short K or few rows are slower than large ones. Of the tiles that
libraries have the fastest counts; smaller ones load more for the same compute, and reach less.
"""

import dataclasses
import math

from geojax.accelerators import Accelerator
from geojax.errors import UserError

TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.93), (256, 64, 0.86), (128, 64, 0.8))
"""Rows and columns of a tile, and the share of the largest tile's rate that it reaches (the same
guide, section "Tile Efficiency")."""

LAUNCH_SECONDS = 4e-6
"""Time from one kernel's last tile to the next one's first: a launch behind a full queue, and the
first loads."""


@dataclasses.dataclass(frozen=True)
class MatmulRate:
    """Rates of one accelerator in matrix products of one precision."""

    flops_per_second: float
    """Rate of large products."""
    bytes_per_second: float
    """Rate of the memory."""
    multiprocessors: int | None
    itemsize: int
    """Bytes of a factor's number."""

    def seconds(
        self, rows: float, columns: float, inner: float, *, out_itemsize: float = 2
    ) -> float:
        """Return the time of one product [rows, inner] x [inner, columns]."""
        flops = 2.0 * rows * columns * inner
        compute = flops / self.flops_per_second / self._shape_efficiency(rows, columns)
        moved = (rows * inner + inner * columns) * self.itemsize + rows * columns * out_itemsize
        drained = self._wave_share(rows, columns) * rows * columns * out_itemsize
        memory = moved / self.bytes_per_second
        return max(compute, memory) + drained / self.bytes_per_second + LAUNCH_SECONDS

    def _shape_efficiency(self, rows: float, columns: float) -> float:
        if self.multiprocessors is None:
            return 1.0
        return max(
            rate * rows * columns / (waves * self.multiprocessors * height * width)
            for height, width, rate in TILES
            for waves in [_waves(rows, columns, height, width, self.multiprocessors)]
        )

    def _wave_share(self, rows: float, columns: float) -> float:
        """Return the share of the result that the last wave makes."""
        if self.multiprocessors is None:
            return 0.0
        height, width, _ = TILES[0]
        return min(1.0, self.multiprocessors * height * width / (rows * columns))


def _waves(rows: float, columns: float, height: int, width: int, units: int) -> int:
    return math.ceil(math.ceil(rows / height) * math.ceil(columns / width) / units)


def matmul_rate(
    accelerator: Accelerator, precision: str, efficiency: float, memory_share: float
) -> MatmulRate:
    """Return the rate of products of `precision`, a name in `Accelerator.peak_flops_per_second`.

    Raises:
        UserError: the accelerator's peak is not known.
    """
    peak = accelerator.peak(precision)
    if peak is None:
        raise UserError(
            f"nothing is known of the {precision} peak of accelerator '{accelerator.name}'; give "
            "its peak_flops_per_second in the topology, or measure it with geojax probe"
        )
    moved = accelerator.memory_bytes_per_second or math.inf
    itemsize = {"float8": 1, "float32": 4, "tensorfloat32": 4, "float64": 8}.get(precision, 2)
    return MatmulRate(
        peak * efficiency, moved * memory_share, accelerator.multiprocessors, itemsize
    )
