"""A product of matrices of about 20 ms on one device, which tells how fast the device is."""

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

from geojax.runtime.key_value_store import await_published, publish

_PRODUCT_SECONDS = 0.02
_FIRST_PRODUCTS = 4
_MOST_PRODUCTS = 100_000


def local_product(agree: Callable[[int | None], int | None], process: int) -> Any:
    """Return a function that dispatches a product of about 20 ms on this process's first device.

    Args:
        agree: returns the number that process 0 gives it, on all processes; None: it does not come.
        process: index of this process.

    Returns:
        A function of a step's loss, after which the product begins; None: nobody agreed.
    """
    device = jax.local_devices()[0]
    size, dtype = (256, "float32") if device.platform == "cpu" else (2048, "bfloat16")
    factor = jax.device_put(jax.numpy.eye(size, dtype=dtype), device)

    def multiply(factor: Any, count: Any, loss: Any) -> Any:
        begun = factor + (0 * loss).astype(factor.dtype)
        return jax.lax.fori_loop(0, count, lambda _, product: product @ factor, begun)[0, 0]

    program = jax.jit(multiply)
    count = None
    if process == 0:
        loss = jax.device_put(jax.numpy.float32(0), device)
        seconds = []
        for _ in range(4):  # the first one compiles
            began = time.monotonic()
            program(factor, _FIRST_PRODUCTS, loss).block_until_ready()
            seconds.append(time.monotonic() - began)
        count = math.ceil(_FIRST_PRODUCTS * _PRODUCT_SECONDS / min(seconds))
        count = min(count, _MOST_PRODUCTS)
    agreed = agree(count)
    if agreed is None:
        return None
    program(factor, 1, jax.device_put(jax.numpy.float32(0), device))  # compiled before training

    def dispatch(loss: jax.Array) -> jax.Array:
        shards: Sequence[Any] = loss.addressable_shards
        here = next(each.data for each in shards if each.device == device)
        product: jax.Array = program(factor, agreed, here)
        return product

    return dispatch


def agreed_count(count: int | None, seconds: float) -> int | None:
    """Tell the others a number, or return what process 0 tells within so many seconds."""
    if count is not None:
        publish("product", str(count))
        return count
    told = await_published("product", seconds)
    return None if told is None or not told.isdecimal() else min(int(told), _MOST_PRODUCTS)
