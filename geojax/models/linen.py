"""The model as a Flax Linen module, for use with Linen's tools."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from geojax.models.chunk.remat import Remat
from geojax.models.config import ModelConfig
from geojax.models.parameters import Parameters, init_parameters, parameter_shapes
from geojax.models.transformer import Batch, logits, loss_sum


class Transformer(nn.Module):
    """Linen wrapper of `logits` and `loss_sum`: its "params" are the tree of `parameter_shapes`.

    `Transformer(config).init(key, batch)["params"]` equals `init_parameters(config, key)`, and
    `apply({"params": parameters}, batch)` equals `logits(parameters, batch, config)`.
    """

    config: ModelConfig
    """The model."""
    dtype: Any = jnp.float32
    """Dtype of the parameters that `init` makes; `apply` computes in that of its parameters."""

    def setup(self) -> None:
        """Declare the parameters, one entry for each top-level name of the tree."""
        for name in parameter_shapes(self.config):
            setattr(self, f"_{name}", self.param(name, self._initial, name))

    def __call__(
        self,
        batch: Batch,
        *,
        dropout_key: jax.Array | None = None,
        attention: str = "auto",
        remat: Remat = "none",
    ) -> jax.Array:
        """Compute logits [B, S, V]; see `geojax.models.logits`."""
        options: dict[str, Any] = {"attention": attention, "remat": remat}
        tree = self._parameters()
        return logits(tree, batch, self.config, dropout_key=dropout_key, **options)

    def loss_sum(
        self,
        batch: Batch,
        *,
        dropout_key: jax.Array | None = None,
        attention: str = "auto",
        remat: Remat = "none",
    ) -> tuple[jax.Array, jax.Array]:
        """Compute the sums of loss and mask (see `geojax.models.loss_sum`).

        Call it with `method="loss_sum"`.
        """
        options: dict[str, Any] = {"attention": attention, "remat": remat}
        tree = self._parameters()
        return loss_sum(tree, batch, self.config, dropout_key=dropout_key, **options)

    def _parameters(self) -> Parameters:
        return {name: getattr(self, f"_{name}") for name in parameter_shapes(self.config)}

    def _initial(self, given: jax.Array, name: str) -> Any:
        # The caller's own key: `given` has the parameter's name folded in. (`apply` has none, and
        # calls this for the shapes only.)
        assert self.scope is not None, "parameters are declared inside init or apply"
        key = self.scope.rngs["params"].rng if self.has_rng("params") else given
        return init_parameters(self.config, key, self.dtype)[name]
