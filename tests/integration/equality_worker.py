"""One of several processes that compare layouts across all of them with one device."""

import sys
import zlib

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from geojax import make_mesh, runtime
from geojax.collectives import BFLOAT16, FLOAT32, INT8, all_reduce

WIRES = {"psum": None, "messages": FLOAT32}
"""Sums over sites as on GPUs, and as they are between processes on CPUs."""


def check_wires() -> int:
    """Sums of the same numbers in a psum and in each wire format; a checksum of their bits."""
    mesh = make_mesh(dc=2, data=4)
    own = np.random.default_rng(0).uniform(-1, 1, (mesh.size, 3000)).astype(np.float32)
    checksum = 0
    for wire, precision in (
        (None, 2.0**-22),
        (FLOAT32, 2.0**-22),
        (BFLOAT16, 2.0**-8),
        (INT8, 1 / 254),
    ):
        program = jax.shard_map(
            lambda x, wire=wire: all_reduce(x[0], "data", "dc", wire=wire),
            mesh=mesh,
            in_specs=P(("dc", "data")),
            out_specs=P(),
        )
        x = jax.make_array_from_callback(
            own.shape, jax.NamedSharding(mesh, P(("dc", "data"))), lambda index: own[index]
        )
        summed = np.asarray(jax.jit(program)(x).addressable_data(0))
        # A site's sum and their sum are rounded, of numbers up to 4 and 8.
        assert np.abs(summed - own.sum(0)).max() <= (4 + 4 + 8) * precision
        checksum = zlib.crc32(summed.tobytes(), checksum)
    return checksum


if __name__ == "__main__":
    runtime.start()
    from support.equality import check_layout

    form, *layouts = sys.argv[1:]
    for layout in layouts:
        # Messages are of float32, so that numbers of 64 bits cross in a psum only.
        if form == "psum":
            check_layout("llama", "fp64", layout)
        check_layout("llama", "fp32", layout, wire_format=WIRES[form])
        print(layout, "equal")
    print("wires", check_wires())
    runtime.finish()
