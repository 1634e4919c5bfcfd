"""Precision policies: the dtypes of the weights in use, of the master copy, and of the sums."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np

from geojax.errors import UserError
from geojax.precision.recipes import RECIPES, Recipe
from geojax.suggestions import did_you_mean


@dataclasses.dataclass(frozen=True)
class Policy:
    """The dtypes of one training step, after "Mixed Precision Training" (Micikevicius et al. 2018).

    Norms, softmax and cross-entropy choose their own dtype: never below float32, and float64 when
    `compute_dtype` is float64.
    """

    name: str
    """Name of the policy in a config."""
    compute_dtype: np.dtype[Any]
    """Dtype of the weights that the model is given, and so of activations and matmuls."""
    master_dtype: np.dtype[Any]
    """Dtype of the master weights and the optimizer's moments."""
    reduce_dtype: np.dtype[Any]
    """Dtype in which gradients are accumulated over microbatches and summed over devices."""
    recipe: Recipe | None = None
    """FP8 recipe of the linear layers; None: they multiply in the compute dtype. All else is the
    same with and without."""

    @property
    def scales_loss(self) -> bool:
        """True if gradients need a loss scale (`geojax.precision.loss_scale`)."""
        return self.compute_dtype == np.float16


_POLICIES = {
    name: Policy(name, np.dtype(compute), np.dtype(master), np.dtype(reduce))
    for name, compute, master, reduce in (
        ("fp32", jnp.float32, jnp.float32, jnp.float32),
        ("bf16", jnp.bfloat16, jnp.float32, jnp.float32),
        ("fp16", jnp.float16, jnp.float32, jnp.float32),
        ("fp64", jnp.float64, jnp.float64, jnp.float64),
    )
}


_POLICIES |= {
    f"fp8-{name}": dataclasses.replace(_POLICIES["bf16"], name=f"fp8-{name}", recipe=recipe)
    for name, recipe in RECIPES.items()
}


def policy(name: str) -> Policy:
    """Look up the policy called `name`.

    Names are "fp32", "bf16", "fp16", "fp64" (which needs `jax_enable_x64`), and those of an FP8
    recipe on top of bf16: "fp8-delayed", "fp8-current", "fp8-block" and "fp8-mxfp8".

    Raises:
        UserError: there is no such policy.
    """
    if name not in _POLICIES:
        raise UserError(f"no precision policy is called '{name}'; {did_you_mean(name, _POLICIES)}")
    return _POLICIES[name]
