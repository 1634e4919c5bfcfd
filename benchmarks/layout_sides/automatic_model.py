"""The same Llama for automatic sharding: whole arrays, and constraints where XLA needs a hint.

A row that the ranks of `context` share is cut into pieces, and the pieces of all rows are the
leading dim of everything: they lie on (context, dc, data, expert), and only attention, which needs
the other pieces of its row, knows of them. (Two sharded dims, rows and positions, that every matrix
product must merge would be put together on every device before each of them.)
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from geojax.models import ModelConfig
from geojax.models.attention import attention
from geojax.models.layers import Norm
from geojax.models.parallel.sequence_order import position_order
from geojax.models.rotary import rotary_table, rotate
from geojax.step.plan import BATCH_AXES, StepPlan

PIECES = ("context", *BATCH_AXES)
"""The axes over which the pieces of rows are spread."""

ATTENTION_ROWS = 64
"""Query rows that are computed at a time where a row is in pieces, each with the columns before."""

# As geojax without rematerialization does: what lies between matrix products is computed again.
_keep_products = functools.partial(
    jax.checkpoint,
    prevent_cse=False,
    policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
)


@dataclasses.dataclass(frozen=True)
class AutomaticModel:
    """The model's loss, with constraints for one layout."""

    config: ModelConfig
    plan: StepPlan
    compute_specs: Any
    """How the weights lie where they are computed with."""
    state_specs: Any
    """How the master weights lie."""

    def pieces(self, batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The batch [microbatches, pieces of one, columns]."""
        ranks, count = self.plan.parallelism.context, self.plan.layout.batch.microbatches

        def cut(leaf: np.ndarray) -> np.ndarray:
            ordered = leaf[:, position_order(leaf.shape[1], self.plan.parallelism)]
            parts = ordered.reshape(count, -1, ranks, leaf.shape[1] // ranks)
            return parts.transpose(0, 2, 1, 3).reshape(count, -1, parts.shape[-1])

        return {name: cut(leaf) for name, leaf in batch.items() if leaf.ndim > 1}

    def loss_sum(self, parameters: Any, batch: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        """Sum of the tokens' losses and number of targets, of [pieces, columns] of tokens."""
        x = self._stream(parameters["embedding"]["tokens"]["embedding"][batch["tokens"]])
        rotary = rotary_table(batch["positions"], self.config, x.dtype)

        def body(x: jax.Array, layer: Any) -> tuple[jax.Array, None]:
            return self._layer(self._weights_of_layer(layer), x, rotary, batch["segment_ids"]), None

        x, _ = lax.scan(body, x, parameters["layers"])
        hidden = self._whole(self._norm(parameters["final_norm"], x))
        kernel = parameters["head"]["kernel"]
        if self.plan.layout.zero.stage == 3:
            kernel = self._gathered(kernel, ("head", "kernel"))
        logits = self._put(self._linear(hidden, kernel), PIECES, None, "tensor")
        # By comparison, since picking a column out of a cut dim gathers the logits.
        is_target = batch["targets"][..., None] == jnp.arange(logits.shape[-1])
        target = jnp.sum(jnp.where(is_target, logits, 0), axis=-1)
        losses = jax.nn.logsumexp(logits, axis=-1) - target
        return jnp.sum(losses * batch["loss_mask"]), jnp.sum(batch["loss_mask"])

    def _layer(
        self, own: Any, x: jax.Array, rotary: tuple[jax.Array, jax.Array], segments: jax.Array
    ) -> jax.Array:
        query, key, value = _keep_products(self._project)(own, x, rotary)
        mixed = self._attention(query, key, value, segments).reshape(*x.shape[:2], -1)
        x = x + self._stream(self._linear(mixed, own["attention"]["output"]["kernel"]))
        return x + _keep_products(self._feed_forward)(own, x)

    def _norm(self, parameters: Any, x: jax.Array) -> jax.Array:
        return nnx.merge(nnx.graphdef(Norm(x.shape[-1], self.config)), parameters)(x)

    def _project(
        self, own: Any, x: jax.Array, rotary: tuple[jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        normed = self._whole(self._norm(own["attention_norm"], x))
        query, key, value = (
            self._heads(normed, own["attention"][name]["kernel"])
            for name in ("query", "key", "value")
        )
        return rotate(query, rotary), rotate(key, rotary), value

    def _feed_forward(self, own: Any, x: jax.Array) -> jax.Array:
        normed = self._whole(self._norm(own["feed_forward_norm"], x))
        kernels = own["feed_forward"]
        gate = self._linear(normed, kernels["gate"]["kernel"])
        up = self._linear(normed, kernels["up"]["kernel"])
        middle = self._put(jax.nn.silu(gate) * up, PIECES, None, "tensor")
        return self._stream(self._linear(middle, kernels["down"]["kernel"]))

    def _linear(self, x: jax.Array, kernel: jax.Array) -> jax.Array:
        product = x.reshape(-1, x.shape[-1]) @ kernel
        return product.reshape(*x.shape[:-1], -1)

    def _heads(self, x: jax.Array, kernel: jax.Array) -> jax.Array:
        """[pieces, columns, heads, head size]; key and value heads too few are repeated."""
        tensor, size = self.plan.parallelism.tensor, self.config.head_dim
        heads = kernel.shape[-1] // size
        if heads < tensor:
            repeated = jnp.repeat(kernel.reshape(-1, heads, size), tensor // heads, axis=1)
            kernel = self._put(repeated.reshape(kernel.shape[0], -1), None, "tensor")
        product = self._linear(x, kernel).reshape(*x.shape[:2], -1, size)
        return self._put(product, PIECES, None, "tensor")

    def _attention(
        self, query: jax.Array, key: jax.Array, value: jax.Array, segments: jax.Array
    ) -> jax.Array:
        parallelism = self.plan.parallelism
        if parallelism.context == 1:
            return attention(query, key, value, segments)
        if parallelism.context_method == "ulysses":
            shape = query.shape
            query, key, value = (
                self._rows(x, heads=("context", "tensor")) for x in (query, key, value)
            )
            whole = attention(query, key, value, self._rows(segments))
            parts = whole.reshape(whole.shape[0], parallelism.context, -1, *whole.shape[2:])
            parts = self._put(parts.swapaxes(0, 1), "context", BATCH_AXES, None, "tensor")
            return self._put(parts.reshape(shape), PIECES, None, "tensor")
        return self._attention_of_pieces(query, key, value, segments)

    def _rows(self, x: jax.Array, heads: Any = "tensor") -> jax.Array:
        """[rows, sequence, ...] of pieces [pieces, columns, ...], columns in the pieces' order."""
        parts = x.reshape(self.plan.parallelism.context, -1, *x.shape[1:])
        # One thing at a time, or XLA goes by way of an array that is whole on every device.
        for spec in (("context", BATCH_AXES, None, "tensor"), (None, BATCH_AXES, None, heads)):
            parts = self._put(parts, *spec[: parts.ndim])
        parts = parts.swapaxes(0, 1)
        return parts.reshape(parts.shape[0], -1, *x.shape[2:])

    def _attention_of_pieces(
        self, query: jax.Array, key: jax.Array, value: jax.Array, segments: jax.Array
    ) -> jax.Array:
        """Keys and values gathered; each rank's queries a few at a time, as far as any can see."""
        ranks, size = self.plan.parallelism.context, self.config.head_dim
        pieces, length, heads = query.shape[:3]
        groups = key.shape[2]
        order = position_order(length * ranks, self.plan.parallelism)
        natural, positions = np.argsort(order), order.reshape(ranks, length)
        key, value, columns = (self._rows(x)[:, natural] for x in (key, value, segments))
        query = query.reshape(ranks, -1, length, groups, heads // groups, size)
        segments = segments.reshape(ranks, -1, length)
        mixed = []
        for start in range(0, length, ATTENTION_ROWS):
            part = slice(start, min(start + ATTENTION_ROWS, length))
            seen = int(positions[:, part].max()) + 1
            scores = jnp.einsum("cbtkgd,bskd->cbkgts", query[:, :, part], key[:, :seen])
            causal = positions[:, None, part, None] >= np.arange(seen)
            same = segments[:, :, part, None] == columns[None, :, None, :seen]
            allowed = (causal & same)[:, :, None, None]
            scores = jnp.where(allowed, scores / math.sqrt(size), -jnp.inf)
            weights = jax.nn.softmax(scores, axis=-1)
            mixed.append(jnp.einsum("cbkgts,bskd->cbtkgd", weights, value[:, :seen]))
        return self._put(
            jnp.concatenate(mixed, axis=2).reshape(pieces, length, heads, size),
            *(PIECES, None, "tensor"),
        )

    def _stream(self, x: jax.Array) -> jax.Array:
        """The residual stream: sequence parallelism cuts its columns over `tensor`."""
        return self._put(x, PIECES, "tensor" if self.plan.parallelism.sequence else None)

    def _whole(self, x: jax.Array) -> jax.Array:
        """What column-parallel products read."""
        return self._put(x, PIECES)

    def _weights_of_layer(self, layer: Any) -> Any:
        """ZeRO 2 and 3: a layer's weights as they are computed with, its gradient in shards."""
        if self.plan.layout.zero.stage < 2:
            return layer
        return jax.tree_util.tree_map_with_path(
            lambda path, leaf: self._gathered(
                leaf, ("layers", *(entry.key for entry in path)), stacked=True
            ),
            layer,
        )

    def _gathered(
        self, leaf: jax.Array, path: tuple[str, ...], *, stacked: bool = False
    ) -> jax.Array:
        compute, state = self.compute_specs, self.state_specs
        for name in path:
            compute, state = compute[name], state[name]
        skipped = 1 if stacked else 0
        return _forth_and_back(
            leaf,
            NamedSharding(self.plan.mesh, PartitionSpec(*compute[skipped:])),
            NamedSharding(self.plan.mesh, PartitionSpec(*state[skipped:])),
        )

    def _put(self, x: jax.Array, *spec: Any) -> jax.Array:
        sharding = NamedSharding(self.plan.mesh, PartitionSpec(*spec))
        return lax.with_sharding_constraint(x, sharding)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _forth_and_back(x: jax.Array, forth: NamedSharding, back: NamedSharding) -> jax.Array:
    """`x` laid out as `forth`, its gradient as `back`."""
    return lax.with_sharding_constraint(x, forth)


def _forth(x: jax.Array, forth: NamedSharding, back: NamedSharding) -> tuple[jax.Array, None]:
    return _forth_and_back(x, forth, back), None


def _back(
    forth: NamedSharding, back: NamedSharding, _: None, gradient: jax.Array
) -> tuple[jax.Array]:
    return (lax.with_sharding_constraint(gradient, back),)


_forth_and_back.defvjp(_forth, _back)
