"""Causal self-attention of a layer: its projections, and what queries see.

Shapes: B batch, S sequence, H hidden, N heads, K kv heads, D head dim.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx

from geojax.models.attention import attention
from geojax.models.config import ModelConfig
from geojax.models.context import ON_ONE_DEVICE, ComputeSettings, LayerContext, rotary_tables
from geojax.models.declaration import normal, parameter
from geojax.models.layers import Linear, Norm, apply_entered
from geojax.models.moe import SAVEABLE_MOE
from geojax.models.parallel.tensor import (
    TP_COPIED,
    join_positions,
    join_stream,
    split_positions,
    split_stream,
)
from geojax.models.rotary import rotate, score_scale
from geojax.precision import SAVEABLE_MATMULS

RotaryTable = tuple[jax.Array, jax.Array]

computed_twice = functools.partial(jax.checkpoint, prevent_cse=False)
"""Keep the arguments of a function alone for the backward pass, which computes it again."""

# The backward pass keeps the results of matmuls and recomputes the element-wise operations between
# them. That halves the memory of a layer and, since recomputing is cheaper than a round trip to
# memory, it also takes less time (7% of a step on a CPU). Results of collectives are kept too.
keep_products = functools.partial(
    computed_twice,
    policy=jax.checkpoint_policies.save_from_both_policies(
        jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
        jax.checkpoint_policies.save_only_these_names(TP_COPIED, *SAVEABLE_MOE, *SAVEABLE_MATMULS),
    ),
)


class SelfAttention(nnx.Module):
    """Self-attention of any kind, which projects to queries, keys and values in its own way."""

    output: Linear

    def __init__(self, config: ModelConfig, compute: ComputeSettings):
        self.config, self.compute = config, compute

    def __call__(self, x: jax.Array, context: LayerContext, norm: Norm) -> jax.Array:
        """Compute the contribution to the stream `x` [B, S, H], which `norm` normalizes first."""
        parts = split_stream(x, self.compute.parallelism)
        return join_stream(self.of_parts(parts, context, norm))

    def of_parts(
        self, parts: Sequence[jax.Array], context: LayerContext, norm: Norm
    ) -> Sequence[jax.Array]:
        """Compute the contribution to each part of the stream, which `norm` normalizes first."""
        if context.rotary is None and context.positions is not None:  # in a model of your own
            tables = rotary_tables(context.positions, self.config, parts[0].dtype)
            context = context._replace(rotary=tables[0], local_rotary=tables[1])
        rotary = self._rotary(context)

        @keep_products
        def project(parts: Sequence[jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
            return self.project(tuple(map(norm, parts)), rotary, context)

        query, key, value = project(parts)
        if context.attend is None:
            mixed = self.attend(query, key, value, context)
        else:
            mixed = context.attend(self, query, key, value)

        # Attention already keeps its result, so it is not kept once more in another shape.
        @computed_twice
        def put_together(mixed: jax.Array) -> Sequence[jax.Array]:
            mixed = mixed.reshape(*mixed.shape[:2], -1)
            return self.output.of_parts(split_positions(mixed, self.compute.parallelism), context)

        return put_together(mixed)

    def project(
        self, normed: Sequence[jax.Array], rotary: RotaryTable | None, context: LayerContext
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Project parts [B, S, H] of the normed stream to query, key and value.

        Each kind of attention defines it.

        Returns:
            Query [B, S, N, D], key [B, S, K, D] and value [B, S, K, dims of a value]; query and key
            rotated by their positions where those are rotary. With tensor parallelism these are
            this rank's heads (at least one of keys and values), of all positions.
        """
        raise NotImplementedError

    def entered_products(
        self, normed: Sequence[jax.Array], layers: Sequence[Linear], context: LayerContext
    ) -> list[jax.Array]:
        """Apply each of `layers` to all parts of the normed stream: [B, S, outputs], in order."""
        made = apply_entered(normed, layers, context, at_once=True)  # a layer begins with them
        return [join_positions(each, self.compute.parallelism.tensor) for each in made]

    def attend(
        self, query: jax.Array, key: jax.Array, value: jax.Array, context: LayerContext
    ) -> jax.Array:
        """Mix the values that each query sees in its sequence, [B, S, N, dims of a value]."""
        config = self.config
        return attention(
            query,
            key,
            value,
            context.segment_ids,
            implementation=self.compute.attention,
            scale=score_scale(config),
            softcap=config.attn_logit_softcapping,
            window=config.sliding_window,
            is_windowed=self.is_windowed(context),
            sinks=self.sink_scores,
            parallelism=self.compute.parallelism,
        )

    def is_windowed(self, context: LayerContext) -> jax.Array | None:
        """Return True, bool [], if the layer has a window; None: all layers are alike.

        Layers that differ in nothing but the window are computed by one program, which is told by
        data.
        """
        period = self.config.has_window
        if len(period) == 1:
            return None
        assert context.layer is not None, "layers that differ have numbers"
        return jnp.asarray(period)[context.layer % len(period)]

    @property
    def sink_scores(self) -> jax.Array | None:
        """The sinks of this rank's heads, [N] in at least float32; None: no sinks."""
        return None

    def _rotary(self, context: LayerContext) -> RotaryTable | None:
        """Return cosines and sines of the layer: of one with a window `local_rotary`."""
        if context.local_rotary is None:
            return context.rotary
        windowed = self.is_windowed(context)
        if windowed is None:
            return context.local_rotary
        return jax.tree.map(
            functools.partial(jnp.where, windowed), context.local_rotary, context.rotary
        )


class Attention(SelfAttention):
    """Self-attention of heads, whose queries may share keys and values."""

    def __init__(self, config: ModelConfig, compute: ComputeSettings = ON_ONE_DEVICE):
        super().__init__(config, compute)
        hidden, heads, width = config.hidden_size, config.num_key_value_heads, config.head_dim
        of_queries, bias = config.num_attention_heads * width, config.attention_output_bias
        layer = functools.partial(Linear, config=config, compute=compute)
        project = functools.partial(layer, hidden, sharding="columns", bias=config.qkv_bias)
        self.query = project(of_queries, target="q_proj")
        self.key = project(heads * width, heads=heads, target="k_proj")
        self.value = project(heads * width, heads=heads, target="v_proj")
        self.output = layer(of_queries, hidden, sharding="rows", bias=bias, target="o_proj")
        if config.use_qk_norm:
            self.query_norm = Norm(width, config, of_heads=True, has_bias=False)
            self.key_norm = Norm(width, config, of_heads=True, has_bias=False)
        if config.use_attention_sinks:
            initial = normal(config.initializer_range)
            self.sinks = parameter((config.num_attention_heads,), initial, axes=("tensor",))

    def project(
        self, normed: Sequence[jax.Array], rotary: RotaryTable | None, context: LayerContext
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """See `SelfAttention.project`; query and key are normed with `use_qk_norm`."""
        query, key, value = (
            made.reshape(*made.shape[:2], -1, self.config.head_dim)
            for made in self.entered_products(normed, (self.query, self.key, self.value), context)
        )
        if self.config.use_qk_norm:
            query, key = self.query_norm(query), self.key_norm(key)
        if rotary is not None:
            query, key = rotate(query, rotary), rotate(key, rotary)
        return query, key, value

    @property
    def sink_scores(self) -> jax.Array | None:
        """See `SelfAttention.sink_scores`."""
        if not self.config.use_attention_sinks:
            return None
        sinks: jax.Array = self.sinks.get_value()
        return sinks.astype(jnp.promote_types(sinks.dtype, jnp.float32))
