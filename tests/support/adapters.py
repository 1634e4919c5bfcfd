"""Small models with adapters that already do something."""

import jax
import numpy as np
from support.small_models import drawn_parameters

from geojax.models.lora import LORA_B


def adapted_parameters(model, dtype):
    """Parameters whose `lora_b` are not zero."""
    generator = np.random.default_rng(0)

    def moved(path, leaf):
        if path[-1].key != LORA_B:
            return leaf
        return leaf + 0.1 * generator.standard_normal(leaf.shape).astype(leaf.dtype)

    return jax.tree_util.tree_map_with_path(moved, drawn_parameters(model, dtype))
