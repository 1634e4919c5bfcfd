"""Amax leaves: beside a linear layer's kernel on the way in, and in its gradient on the way out.

The amax of a layer's operands (see `geojax.precision.linear_matmul`) travels through a training
step in the tree of the layer's weights. The two functions put it there and take it out again.
"""

from typing import Any

from geojax.precision.linear_matmul import AMAX


def attach_amax(weights: Any, amax: Any) -> Any:
    """Put `amax`, a tree of `AMAX` leaves, beside the kernels of the layers' `weights`."""
    if amax is None or AMAX in amax:
        return weights | (amax or {})
    return weights | {name: attach_amax(weights[name], below) for name, below in amax.items()}


def detach_amax(gradients: Any) -> tuple[Any, Any]:
    """Take gradients of weights and the amax (None: there is none) apart again."""
    weights, amax = {}, {}
    for name, below in gradients.items():
        if name == AMAX:
            amax[name] = below
        elif isinstance(below, dict):
            weights[name], inside = detach_amax(below)
            if inside:
                amax[name] = inside
        else:
            weights[name] = below
    return weights, amax or None
