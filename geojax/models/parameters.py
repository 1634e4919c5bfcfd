"""Parameter tree: shapes, initial values, and the leaves that weight decay applies to.

Layers are stacked on a leading dim. Every matrix is called "kernel" and maps its second-last dim to
its last one. Tables are called "embedding", and norms have a "scale" and perhaps a "bias". Weight
decay and sharding can therefore go by a leaf's name.
"""

import math
import zlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from geojax.models.config import ModelConfig
from geojax.models.lora import LORA_A, LORA_B, init_adapter, is_adapter, with_adapter_shapes

Parameters = dict[str, Any]
"""Nested dict of arrays (or of their shapes, or of anything else leaf by leaf)."""

UNQUANTIZED = frozenset({"router", "query_down", "key_value_down"})
"""Owners of kernels in the layers that multiply in the compute dtype, also under FP8."""

SINKS = "sinks"
"""Name of the leaf of attention's sinks (see `geojax.models.attention.blocks`)."""

SCORE_BIAS = "score_bias"
"""Name of the router's bias, in place of whose gradient comes the excess of its experts' choices
(see `geojax.models.moe.score_bias`); it is no weight that an optimizer trains."""


def parameter_shapes(config: ModelConfig, dtype: Any = jnp.float32) -> Parameters:
    """Return the parameter tree of `config` as `jax.ShapeDtypeStruct`s; touches no device.

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
    """
    hidden = config.hidden_size

    def array(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    tree: Parameters = {"embedding": {"tokens": {"embedding": array(config.vocab_size, hidden)}}}
    if config.position_embedding_type == "learned_absolute":
        positions = {"embedding": array(config.max_position_embeddings, hidden)}
        tree["embedding"]["positions"] = positions
    if config.first_k_dense_replace:
        dense = _stacked_layers(config, config.first_k_dense_replace, dtype, with_experts=False)
        tree["embedding"]["dense_layers"] = dense
    tree["layers"] = _stacked_layers(
        config, config.num_stacked_layers, dtype, with_experts=config.is_moe
    )
    tree["final_norm"] = _norm(config, array(hidden))
    if modules := config.num_nextn_predict_layers:
        tree["mtp"] = {
            "embedding_norm": _norm(config, array(modules, hidden)),
            "stream_norm": _norm(config, array(modules, hidden)),
            "projection": {"kernel": array(modules, 2 * hidden, hidden)},
            "layers": _stacked_layers(config, modules, dtype, with_experts=config.is_moe),
            "final_norm": _norm(config, array(modules, hidden)),
        }
    if not config.tie_word_embeddings:
        tree["head"] = {"kernel": array(hidden, config.vocab_size)}
    return tree if config.lora is None else with_adapter_shapes(tree, config.lora)


def _stacked_layers(
    config: ModelConfig, count: int, dtype: Any, *, with_experts: bool
) -> Parameters:
    """Return the tree of `count` layers, dense or with experts."""
    hidden = config.hidden_size

    def array(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((count, *shape), dtype)

    def matrix(*dims: int, bias: bool = False) -> Parameters:
        kernel = {"kernel": array(*dims)}
        return kernel | {"bias": array(*dims[:-2], dims[-1])} if bias else kernel

    def feed_forward(width: int, *leading: int, bias: bool = False) -> Parameters:
        block = {"up": matrix(*leading, hidden, width, bias=bias)}
        if config.gated:
            block["gate"] = matrix(*leading, hidden, width, bias=bias)
        return block | {"down": matrix(*leading, width, hidden, bias=bias)}

    def attention() -> Parameters:
        query_width = config.num_attention_heads * config.head_dim
        key_value_width = config.num_key_value_heads * config.head_dim
        block: Parameters = {
            "query": matrix(hidden, query_width, bias=config.qkv_bias),
            "key": matrix(hidden, key_value_width, bias=config.qkv_bias),
            "value": matrix(hidden, key_value_width, bias=config.qkv_bias),
            "output": matrix(query_width, hidden, bias=config.attention_output_bias),
        }
        if config.use_qk_norm:
            scale = {"scale": array(config.head_dim)}
            block |= {"query_norm": scale, "key_norm": dict(scale)}
        if config.use_attention_sinks:
            block[SINKS] = array(config.num_attention_heads)
        return block

    def latent_attention() -> Parameters:
        heads, latent = config.num_attention_heads, config.kv_lora_rank
        of_head = config.qk_nope_head_dim + config.v_head_dim
        block = {
            "query": matrix(config.q_lora_rank or hidden, heads * config.head_dim),
            "key_value_down": matrix(hidden, latent + config.qk_rope_head_dim),
            "key_value_down_norm": {"scale": array(latent)},
            "key_value": matrix(latent, heads * of_head),
            "output": matrix(heads * config.v_head_dim, hidden, bias=config.attention_output_bias),
        }
        if config.q_lora_rank:
            block["query_down"] = matrix(hidden, config.q_lora_rank)
            block["query_down_norm"] = {"scale": array(config.q_lora_rank)}
        return block

    layers: Parameters = {
        "attention_norm": _norm(config, array(hidden)),
        "attention": latent_attention() if config.has_latent_attention else attention(),
        "feed_forward_norm": _norm(config, array(hidden)),
    }
    if config.sandwich_norm:
        layers["attention_post_norm"] = _norm(config, array(hidden))
        layers["feed_forward_post_norm"] = _norm(config, array(hidden))
    if not with_experts:
        dense = feed_forward(config.intermediate_size, bias=config.mlp_bias)
        return layers | {"feed_forward": dense}
    layers["router"] = matrix(hidden, config.num_experts, bias=config.moe_bias)
    if config.use_router_bias:
        layers["router"][SCORE_BIAS] = array(config.num_experts)
    layers["experts"] = feed_forward(
        config.moe_intermediate_size, config.num_experts, bias=config.moe_bias
    )
    if config.n_shared_experts:
        layers["shared_experts"] = feed_forward(config.shared_expert_intermediate_size)
    return layers


def _norm(config: ModelConfig, array: jax.ShapeDtypeStruct) -> Parameters:
    has_bias = config.norm.startswith("layernorm")
    return {"scale": array, "bias": array} if has_bias else {"scale": array}


def parameter_count(config: ModelConfig) -> int:
    """Count the parameters of the model, adapters included; a tied head counts once."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(parameter_shapes(config)))


def active_parameter_count(config: ModelConfig) -> int:
    """Count the parameters that one token activates: of the experts those that it goes to."""
    if not config.is_moe:
        return parameter_count(config)
    shapes = parameter_shapes(config)
    layers = [shapes["layers"], *([shapes["mtp"]["layers"]] if "mtp" in shapes else [])]
    experts = jax.tree.leaves([each["experts"] for each in layers])
    unmet = config.num_experts - config.num_experts_per_tok
    of_one = sum(math.prod(leaf.shape) for leaf in experts) // config.num_experts
    return parameter_count(config) - unmet * of_one


def init_parameters(config: ModelConfig, key: jax.Array, dtype: Any = jnp.float32) -> Parameters:
    """Draw initial parameters, in the tree of `parameter_shapes`.

    Matrices, tables and sinks are normal with `config.initializer_range`; the two outputs into the
    residual stream (attention/output and every down) with 1/sqrt(2 layers) of it, as in GPT-2
    ("Language Models are Unsupervised Multitask Learners", Radford et al. 2019, section 2.3) and
    Megatron-LM. Biases are 0 and scales 1 (stored as 0 by LayerNorm1p and RMSNorm1p); adapters
    begin as `init_adapter` says.

    Each leaf's key is folded from `key` and the leaf's path. Values are drawn in float32 and then
    cast, so they depend on `dtype` only by rounding. Under `jax.jit` with `out_shardings` they do
    not depend on the sharding either, except for a last bit that XLA rounds by the array's shape.
    """
    output_deviation = config.initializer_range / math.sqrt(2 * config.num_hidden_layers)

    def initial(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> jax.Array:
        names = [entry.key for entry in path]
        leaf_key = jax.random.fold_in(key, np.uint32(zlib.crc32("/".join(names).encode())))
        if is_adapter(path):
            return init_adapter(names[-1], leaf_key, leaf.shape, dtype)
        is_stored_minus_1 = names[-1] == "scale" and config.norm.endswith("1p")
        if names[-1] in ("bias", SCORE_BIAS) or is_stored_minus_1:
            return jnp.zeros(leaf.shape, dtype)
        if names[-1] == "scale":
            return jnp.ones(leaf.shape, dtype)
        is_output = names[-2] in ("output", "down")
        deviation = output_deviation if is_output else config.initializer_range
        return (deviation * jax.random.normal(leaf_key, leaf.shape, jnp.float32)).astype(dtype)

    return jax.tree_util.tree_map_with_path(initial, parameter_shapes(config))


def is_score_bias(path: tuple[Any, ...]) -> bool:
    """Return True for the path of a leaf in whose gradient's place there is an experts' excess."""
    return bool(path) and getattr(path[-1], "key", None) == SCORE_BIAS


def is_matrix_or_table(name: str) -> bool:
    """Return True for the dotted name of a matrix or a table, which weight decay applies to.

    The other parameters are scales, biases and sinks.
    """
    return name.rpartition(".")[2] in ("kernel", "embedding", LORA_A, LORA_B)


def is_matrix_of_layers(name: str) -> bool:
    """Return True for the dotted name of a matrix in the layers: no table, and not the head."""
    *above, last = name.split(".")
    return last == "kernel" and ("dense_layers" in above or above[:1] in (["layers"], ["mtp"]))
