"""All that the transports use of JAX beyond its documented interface."""

from typing import Any, cast

import jax


def is_ready(array: jax.Array) -> bool:
    """Return True if the array is computed and here, or can never be."""
    return cast(Any, array).is_ready()
