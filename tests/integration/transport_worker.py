"""One site of the test of the transport: exchanges messages until it is told otherwise.

    transport_worker.py SITE COORDINATOR STEPS SECONDS_A_STEP [SILENCE_SECONDS]

Prints "step N" now and then, its address and port first, and the error that ends it.
"""

import os
import sys
import time

os.environ.update(JAX_PLATFORMS="cpu", NPROC="32")

import jax
import jax.numpy as jnp

from geojax.errors import RunError
from geojax.job.island_env import IslandSettings
from geojax.transport import Membership, MessageKey, Streams, connect


def main(site: int, coordinator: str, steps: int, seconds: float, silence: float = 15.0) -> None:
    sites = ("east", "west")
    island = IslandSettings(
        site=sites[site], sites=sites, coordinators=(coordinator,), key="k" * 32
    )
    members = Membership(island, 0, 1, {})
    transport = connect(members, Streams(4, 1 << 18), 16 << 20, silence_seconds=silence)
    print("address", *transport.address, flush=True)
    values = jnp.arange(1 << 16, dtype=jnp.float32)
    like = jax.ShapeDtypeStruct(values.shape, values.dtype, sharding=values.sharding)
    for step in range(steps):
        key = MessageKey(step, "bucket")
        fetch = transport.fetch(1 - site, key, [like])
        transport.offer(1 - site, key, [values + step])
        (got,) = fetch.result()
        assert bool((got == values + step).all()), f"step {step} brings its own values"
        if step % 10 == 0:
            print("step", step, flush=True)
        time.sleep(seconds)
    transport.drain()
    transport.close()
    print("done", flush=True)


if __name__ == "__main__":
    try:
        main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), *map(float, sys.argv[4:]))
    except RunError as error:
        print(error, flush=True)
        sys.exit(1)
