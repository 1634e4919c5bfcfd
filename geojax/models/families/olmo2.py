"""OLMo 2: norms behind the blocks alone, and norms of all heads' queries and keys together."""

from collections.abc import Sequence
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from geojax.models.block import Block
from geojax.models.config import ModelConfig
from geojax.models.context import ON_ONE_DEVICE, ComputeSettings, LayerContext
from geojax.models.declaration import constant, parameter
from geojax.models.families.llama import (
    ATTENTION,
    ATTENTION_DROPOUT,
    EMBEDDING_AND_HEAD,
    FEED_FORWARD,
    SILU,
    SIZES,
    SWIGLU,
)
from geojax.models.huggingface.family import ConfigKey, Family, TensorRule
from geojax.models.layers import Norm
from geojax.models.parallel.tensor import TP_COPIED
from geojax.models.rotary import rotate
from geojax.models.self_attention import Attention, RotaryTable


class WholeNorm(Norm):
    """RMSNorm of all heads together, of which a rank of `tensor` has its own.

    Args:
        size: numbers of all heads.
        config: the model.
        compute: how it computes.
        heads: heads of keys, which several ranks may hold; None: of queries.
    """

    def __init__(
        self, size: int, config: ModelConfig, compute: ComputeSettings, heads: int | None = None
    ):
        self.size, self.heads, self.eps = size, heads, config.rms_norm_eps
        self.tensor = compute.parallelism.tensor
        self.scale = parameter((size,), constant(1.0), axes=("tensor",), heads=heads)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalize `x` [..., numbers of this rank's heads], in `x.dtype`."""
        wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        squares, scale = jnp.square(wide).sum(-1, keepdims=True), self.scale.get_value()
        copies = 1 if self.heads is None else max(self.tensor // self.heads, 1)
        if self.tensor > 1:
            squares = checkpoint_name(lax.psum(squares, "tensor"), TP_COPIED)
        if copies > 1:
            first = lax.axis_index("tensor") // copies * x.shape[-1]
            scale = lax.dynamic_slice_in_dim(scale, first, x.shape[-1])
        inverse = lax.rsqrt(squares / (copies * self.size) + self.eps)
        return (wide * inverse * scale.astype(wide.dtype)).astype(x.dtype)


class WholeNormAttention(Attention):
    """Attention whose queries and keys are normed before they are heads."""

    def __init__(self, config: ModelConfig, compute: ComputeSettings = ON_ONE_DEVICE):
        super().__init__(config, compute)
        width, heads = config.head_dim, config.num_key_value_heads
        self.query_norm = WholeNorm(config.num_attention_heads * width, config, compute)
        self.key_norm = WholeNorm(heads * width, config, compute, heads)

    def project(
        self, normed: Sequence[jax.Array], rotary: RotaryTable | None, context: LayerContext
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """See `SelfAttention.project`."""
        assert rotary is not None, "positions are rotary"
        layers = (self.query, self.key, self.value)
        query, key, values = self.entered_products(normed, layers, context)
        queries, keys, values = (
            each.reshape(*each.shape[:2], -1, self.config.head_dim)
            for each in (self.query_norm(query), self.key_norm(key), values)
        )
        return rotate(queries, rotary), rotate(keys, rotary), values


class Unchanged(Norm):
    """A norm that is not there."""

    def __init__(self) -> None:
        pass

    def __call__(self, x: jax.Array) -> jax.Array:
        """Return `x`."""
        return x


class PostNormBlock(Block):
    """A layer whose norms lie behind its halves alone."""

    attention_class = WholeNormAttention

    def __init__(self, config: ModelConfig, compute: ComputeSettings = ON_ONE_DEVICE):
        super().__init__(config, compute)
        self.attention_norm = self.feed_forward_norm = Unchanged()


class Olmo2(ModelConfig):
    """A model with norms behind the halves of each layer."""

    block_class = PostNormBlock
    model_type: Literal["olmo2"] = "olmo2"
    """Family of the model."""
    sandwich_norm: Literal[True] = True
    """See `ModelConfig`; there is no norm before a half."""


def _norm(theirs: str, own: str) -> TensorRule:
    return TensorRule(f"model.layers.{{layer}}.{theirs}.weight", (f"layers.{own}.scale",))


OLMO2 = Family(
    model_type="olmo2",
    architecture="Olmo2ForCausalLM",
    settings=Olmo2,
    keys=(
        *SIZES,
        ConfigKey("num_key_value_heads", ("num_key_value_heads",), None),
        ConfigKey("max_position_embeddings", ("max_position_embeddings",), 2048),
        ConfigKey("rms_norm_eps", ("rms_norm_eps",), 1e-5),
        ConfigKey("attention_bias", ("qkv_bias", "attention_output_bias"), False),
    ),
    implied=SWIGLU | {"sandwich_norm": True},
    fixed=SILU,
    rates=ATTENTION_DROPOUT,
    written={"pad_token_id": None},
    tensors=(
        *EMBEDDING_AND_HEAD,
        *(rule for rule in ATTENTION if "norm" not in rule.name),
        *FEED_FORWARD,
        _norm("self_attn.q_norm", "attention.query_norm"),
        _norm("self_attn.k_norm", "attention.key_norm"),
        _norm("post_attention_layernorm", "attention_post_norm"),
        _norm("post_feedforward_layernorm", "feed_forward_post_norm"),
    ),
)
