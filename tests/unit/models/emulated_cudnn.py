"""What cuDNN computes, in plain JAX for a CPU, and NaN wherever it writes nothing.

Masks begin at the start of each sequence. Where rows hold several sequences their log-sum-exps lie
one after the other in the order of the sequences, each with room for a whole row.
"""

import types

import jax.numpy as jnp
from jax._src.cudnn import fused_attention_stablehlo as binding


def install(monkeypatch):
    """Let JAX's primitives be these functions."""
    for name, function in (("fwd", forward), ("bwd", backward)):
        emulated = types.SimpleNamespace(bind=function)
        monkeypatch.setattr(binding, f"_dot_product_attention_{name}_p_wrapper", emulated)


def forward(
    query, key, value, bias, *places, mask_type, scale, sliding_window_length, is_training, **unused
):
    counts, allowed, sequence, place = layout(query, key, places, mask_type, sliding_window_length)
    scores = jnp.where(allowed, scale * product("bthd,bshd->bhts", query, key), -jnp.inf)
    log_sum_exp = jnp.log(jnp.sum(jnp.exp(scores), axis=-1))
    weights = jnp.exp(scores - log_sum_exp[..., None])
    output = jnp.einsum("bhts,bshd->bthd", weights, all_heads(value, query))
    output = jnp.where(counts[0][:, :, None, None], output, jnp.nan).astype(query.dtype)
    if sequence is None:
        return output, jnp.where(counts[0][:, None], log_sum_exp, jnp.nan)
    most = places[0].shape[1]
    rows, heads, length = log_sum_exp.shape
    statistics = jnp.full((rows * most, heads, length), jnp.nan, log_sum_exp.dtype)
    return output, statistics.at[sequence, :, place].set(log_sum_exp.transpose(0, 2, 1))


def backward(query, key, value, bias, *places, mask_type, scale, sliding_window_length, **unused):
    *places, statistics, output, gradient = places
    counts, allowed, sequence, place = layout(query, key, places, mask_type, sliding_window_length)
    if sequence is not None:
        statistics = statistics[sequence, :, place].transpose(0, 2, 1)
    scores = scale * product("bthd,bshd->bhts", query, key)
    weights = jnp.where(allowed, jnp.exp(scores - statistics[..., None]), 0)
    delta = jnp.einsum("bthd,bthd->bht", gradient, output)
    d_scores = product("bthd,bshd->bhts", gradient, value) - delta[..., None]
    d_scores = jnp.where(allowed, scale * weights * d_scores, 0)
    d_query = jnp.einsum("bhts,bshd->bthd", d_scores, all_heads(key, query))
    d_key = jnp.einsum("bhts,bthd->bshd", d_scores, query)
    d_value = jnp.einsum("bhts,bthd->bshd", weights, gradient)
    results = (d_query, query), (d_key, key), (d_value, value)
    which = (counts[0], counts[1], counts[1])
    return [
        jnp.where(count[:, :, None, None], fewer_heads(x, like), jnp.nan).astype(like.dtype)
        for count, (x, like) in zip(which, results, strict=True)
    ]


def layout(query, key, places, mask_type, window):
    """Which queries [B, T] and keys [B, S] count, which pairs [B, 1, T, S] do, and where rows hold
    several sequences: the number of each query's sequence among all rows, and its place in it."""
    query_lengths, key_lengths, query_starts, key_starts, *_ = places
    length, keys = query.shape[1], key.shape[1]
    kinds = binding.MaskType
    causal = sees_by_place(jnp.arange(length)[:, None], jnp.arange(keys), window)
    assert window is None or mask_type in (kinds.CAUSAL, kinds.PADDING_CAUSAL)
    if mask_type in (kinds.CAUSAL, kinds.NO_MASK):
        counts = jnp.ones(query.shape[:2], bool), jnp.ones(key.shape[:2], bool)
        pairs = causal if mask_type == kinds.CAUSAL else jnp.ones_like(causal)
        return counts, pairs[None, None], None, None
    assert query_lengths.dtype == key_lengths.dtype == jnp.int32
    if query_starts.ndim == 1:
        assert mask_type == kinds.PADDING
        counts = (
            jnp.arange(length) < query_lengths[:, None],
            jnp.arange(keys) < key_lengths[:, None],
        )
        return counts, (counts[0][:, :, None] & counts[1][:, None, :])[:, None], None, None
    assert mask_type == kinds.PADDING_CAUSAL
    (sees, run, place), (seen, key_run, key_place) = (
        runs(length, query_starts, query_lengths),
        runs(keys, key_starts, key_lengths),
    )
    pairs = (run[:, :, None] == key_run[:, None, :]) & sees_by_place(
        place[:, :, None], key_place[:, None], window
    )
    pairs &= sees[:, :, None] & seen[:, None, :]
    many = jnp.sum(query_lengths > 0, axis=1)
    sequence = jnp.cumsum(many)[:, None] - many[:, None] + run
    return (sees, seen), pairs[:, None], sequence, place


def sees_by_place(query, key, window):
    return (query >= key) & ((window is None) or (query - key < window))


def runs(length, starts, lengths):
    """Of each position [B, T]: whether it is in a sequence, in which of its row, at what place."""
    starts = starts[:, :-1, None]
    inside = (jnp.arange(length) >= starts) & (jnp.arange(length) < starts + lengths[..., None])
    run = jnp.argmax(inside, axis=1)
    return inside.any(axis=1), run, jnp.arange(length) - jnp.take_along_axis(starts[..., 0], run, 1)


def product(equation, left, right):
    return jnp.einsum(equation, left, all_heads(right, left))


def all_heads(x, query):
    return jnp.repeat(x, query.shape[2] // x.shape[2], axis=2)


def fewer_heads(x, like):
    return x.reshape(*like.shape[:3], -1, like.shape[3]).sum(axis=3)
