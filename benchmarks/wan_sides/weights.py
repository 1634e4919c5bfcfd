"""Writes geojax's initial weights to a file, for the sides that do not make them themselves.

python -m wan_sides.weights FILE
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np

from geojax.models import ModelConfig, init_parameters
from wan_sides.work import MODEL, SEED


def main(path: str) -> None:
    parameters = init_parameters(ModelConfig(**MODEL), jax.random.key(SEED), jnp.float32)
    leaves = jax.tree_util.tree_leaves_with_path(parameters)
    named = {"/".join(key.key for key in path): np.asarray(leaf) for path, leaf in leaves}
    np.savez(path, **named)


if __name__ == "__main__":
    main(sys.argv[1])
