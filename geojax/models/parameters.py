"""The parameter tree of a model: its modules' declarations, shapes, initial values and counts.

Layers are stacked on a leading dim. Every matrix is called "kernel" and maps its second-last dim to
its last one. Tables are called "embedding", and norms have a "scale" and perhaps a "bias".
"""

import functools
import math
import zlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from geojax.models.block import block_of
from geojax.models.declaration import (
    Declaration,
    KindOf,
    Parameters,
    declared,
    kind_by_name,
    stacked,
)
from geojax.models.embedding import DENSE_LAYERS, Embedding
from geojax.models.head import Head
from geojax.models.layers import Norm
from geojax.models.multi_token_prediction import MultiTokenPrediction
from geojax.models.own.parts import own_initial_values, own_parts
from geojax.models.own.settings import AnyModel, OwnModel
from geojax.named_arrays import leaves_by_name


@functools.lru_cache(maxsize=64)
def declarations(config: AnyModel) -> Parameters:
    """Return the `Declaration` of each parameter of `config`; touches no device.

    With L layers, d hidden, H and K query and kv heads of D dims, F ffn, V vocabulary:

        embedding/tokens/embedding          [V, d]
        embedding/positions/embedding       [max_position_embeddings, d]  learned positions only
        layers/attention_norm/scale         [L, d]      and /bias      LayerNorm and LayerNorm1p
        layers/attention/query/kernel       [L, d, H D] and /bias      bias: qkv_bias
        layers/attention/key/kernel         [L, d, K D] and /bias
        layers/attention/value/kernel       [L, d, K D] and /bias
        layers/attention/output/kernel      [L, H D, d] and /bias      bias: attention_output_bias
        layers/attention/query_norm/scale   [L, D]      and key_norm   use_qk_norm only
        layers/attention/sinks              [L, H]                     use_attention_sinks only
        layers/feed_forward_norm/scale      [L, d]      and /bias
        layers/attention_post_norm/scale    [L, d]      and feed_forward_post_norm; sandwich_norm
        layers/feed_forward/gate/kernel     [L, d, F]   and /bias      with a gate only
        layers/feed_forward/up/kernel       [L, d, F]   and /bias      bias: mlp_bias
        layers/feed_forward/down/kernel     [L, F, d]   and /bias
        final_norm/scale                    [d]         and /bias
        head/kernel                         [d, V]                     unless the head is tied

    With E experts of width F, and shared ones of S F together, in place of feed_forward:

        layers/router/kernel                [L, d, E]   and /bias      bias: moe_bias
        layers/router/score_bias            [L, E]                     use_router_bias only
        layers/experts/gate/kernel          [L, E, d, F] and /bias     with a gate only
        layers/experts/up/kernel            [L, E, d, F] and /bias     bias [L, E, F]: moe_bias
        layers/experts/down/kernel          [L, E, F, d] and /bias
        layers/shared_experts/gate/kernel   [L, d, S F]                and up and down; if S > 0

    and, with first dense layers, their stack beside the tables, since they come with the embedding:

        embedding/dense_layers/...          [first_k_dense_replace, ...]

    With M modules for later tokens (num_nextn_predict_layers), whose layer is like the last ones:

        mtp/embedding_norm/scale            [M, d]      and stream_norm, final_norm
        mtp/projection/kernel               [M, 2 d, d]
        mtp/layers/...                      [M, ...]

    With latents of q and r dims, and P rotated dims, and values of W dims, in place of attention:

        layers/attention/query_down/kernel          [L, d, q]          and the norm unless q is 0
        layers/attention/query_down_norm/scale      [L, q]
        layers/attention/query/kernel               [L, q, H D]        [L, d, H D] where q is 0
        layers/attention/key_value_down/kernel      [L, d, r + P]      latent, rotated part of keys
        layers/attention/key_value_down_norm/scale  [L, r]
        layers/attention/key_value/kernel           [L, r, H (D - P + W)]
        layers/attention/output/kernel              [L, H W, d]

    With adapters of rank R, beside the kernel [..., i, o] of each linear layer that has one:

        .../lora_a [..., i, R]   and   .../lora_b [..., R, o]
    A model of your own has embedding/..., layers/... and head/..., by the attributes of its parts.
    """
    if isinstance(config, OwnModel):
        return own_parts(config).declarations
    tree: Parameters = {"embedding": declared(Embedding(config))}
    if count := config.first_k_dense_replace:
        dense = declared(block_of(config, with_experts=False))
        tree["embedding"][DENSE_LAYERS] = stacked(dense, count)
    block = declared(block_of(config, with_experts=config.is_moe))
    tree["layers"] = stacked(block, config.num_stacked_layers)
    tree["final_norm"] = declared(Norm(config.hidden_size, config))
    if modules := config.num_nextn_predict_layers:
        tree["mtp"] = stacked(declared(MultiTokenPrediction(config)), modules)
    if not config.tie_word_embeddings:
        tree["head"] = declared(Head(config))
    return tree


def parameter_shapes(config: AnyModel, dtype: Any = jnp.float32) -> Parameters:
    """Return the parameter tree of `config` as `jax.ShapeDtypeStruct`s; touches no device."""
    return jax.tree.map(
        lambda declaration: jax.ShapeDtypeStruct(declaration.shape, dtype), declarations(config)
    )


def parameter_count(config: AnyModel) -> int:
    """Count the parameters of the model, adapters included; a tied head counts once."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(declarations(config)))


def init_parameters(config: AnyModel, key: jax.Array, dtype: Any = jnp.float32) -> Parameters:
    """Draw initial parameters, in the tree of `declarations`.

    Each leaf's key is folded from `key` and the leaf's path. Values are drawn in float32 and then
    cast, so they depend on `dtype` only by rounding. Under `jax.jit` with `out_shardings` they do
    not depend on the sharding either, except for a last bit that XLA rounds by the array's shape.
    A model of your own draws its own, from random streams of `key`.
    """

    if isinstance(config, OwnModel):
        return jax.tree.map(lambda leaf: leaf.astype(dtype), own_initial_values(config, key))

    def initial(path: tuple[Any, ...], declaration: Declaration) -> jax.Array:
        name = "/".join(entry.key for entry in path)
        leaf_key = jax.random.fold_in(key, np.uint32(zlib.crc32(name.encode())))
        return declaration.initial(leaf_key, declaration.shape).astype(dtype)

    return jax.tree_util.tree_map_with_path(initial, declarations(config))


@functools.lru_cache(maxsize=64)
def parameter_kinds(config: AnyModel) -> KindOf:
    """Return the function that says what each parameter of a model is to an optimizer."""
    found = leaves_by_name(declarations(config)).items()
    return {name: declared.kind or kind_by_name(name) for name, declared in found}.__getitem__
