"""The head: logits of the vocabulary, and the loss.

For the loss, the logits never exist as a whole. The tokens are taken in chunks. A chunk's logits,
loss and gradient of the logits are computed while they are small. The gradients with respect to the
hidden states and the head's kernel are accumulated at once. The loss is a scalar, so the backward
pass only scales these gradients. Neither a second copy of the logits nor a third matrix product for
recomputation is needed. (The idea is known from Liger Kernel, Hsu et al. 2024.)

With tensor parallelism each rank holds some columns of the kernel, and the stages of a pipeline may
share them too. A token's softmax needs three numbers of all of them, the largest logit, the sum of
exponentials and the target's logit: two small all-reduces of a chunk, forward only (Shoeybi et al.
2019, "Megatron-LM", section 3). The logits never leave their rank.

Shapes: B batch, S sequence, H hidden, V vocabulary.
"""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from geojax.collectives.axes import Tree, vary_over, varying_axes, zero_after, zeros_of
from geojax.models.config import ModelConfig
from geojax.models.context import ON_ONE_DEVICE, ComputeSettings
from geojax.models.declaration import Parameters, normal, parameter
from geojax.models.embedding import TOKENS
from geojax.models.parallel.parallelism import SINGLE_DEVICE, Parallelism
from geojax.models.parallel.tensor import copy_to_tp_region

Carry = TypeVar("Carry")
Output = TypeVar("Output")

CHUNK_BYTES = 512 * 2**20
"""Most bytes of one chunk's logits (but a chunk has at least 1024 tokens, since the kernel's
gradient is read and written once a chunk)."""
LEAST_CHUNK_TOKENS = 1024


class Head(nnx.Module):
    """The logits of the vocabulary, by a kernel or, where it is tied, by the table of tokens."""

    def __init__(self, config: ModelConfig, compute: ComputeSettings = ON_ONE_DEVICE):
        self.config, self.compute = config, compute
        shape, initial = (config.hidden_size, config.vocab_size), normal(config.initializer_range)
        if config.tie_word_embeddings:
            axes: tuple[str | None, ...] = ("vocabulary", None)
            self.embedding = parameter(shape[::-1], initial, kind="table", axes=axes)
        else:
            self.kernel = parameter(shape, initial, kind="table", axes=(None, "vocabulary"))

    @classmethod
    def of(cls, last: Parameters, config: ModelConfig, compute: ComputeSettings) -> "Head":
        """Return the head that has its weight among those of a model's last chunk."""
        own = last["embedding"][TOKENS] if config.tie_word_embeddings else last["head"]
        head: Head = nnx.merge(nnx.graphdef(cls(config, compute)), own)
        return head

    def __call__(self, normed: jax.Array) -> jax.Array:
        """Compute logits [B, S, V], in at least float32, of the stream after the final norm.

        With tensor parallelism they are this rank's part of the vocabulary, of all positions;
        padding of the vocabulary to a multiple of `tensor` comes last.
        """
        hidden = copy_to_tp_region(normed, self.compute.parallelism)
        wide = jnp.promote_types(hidden.dtype, jnp.float32)
        equation = "...d,vd->...v" if self.config.tie_word_embeddings else "...d,dv->...v"
        logits = jnp.einsum(equation, hidden, self.weight, preferred_element_type=wide)
        return soft_cap(logits, self.config.final_logit_softcapping)

    def loss(self, normed: jax.Array, targets: jax.Array, mask: jax.Array) -> jax.Array:
        """Sum the masked losses of predicting `targets` from the stream after the final norm.

        The sum is over the positions of the batch, the same on all ranks that share the vocabulary.
        """
        config, parallelism = self.config, self.compute.parallelism
        return cross_entropy_sum(
            copy_to_tp_region(normed, parallelism),
            self.weight,
            targets,
            mask,
            tied=config.tie_word_embeddings,
            vocabulary=config.vocab_size,
            softcap=config.final_logit_softcapping,
            z_loss=config.z_loss_coef,
            parallelism=parallelism,
        )

    @property
    def weight(self) -> jax.Array:
        """This rank's part of the kernel [H, V], or of the table [V, H]."""
        own = self.embedding if self.config.tie_word_embeddings else self.kernel
        value: jax.Array = own.get_value()
        return value


def cross_entropy_sum(
    hidden: jax.Array,
    kernel: jax.Array,
    targets: jax.Array,
    mask: jax.Array,
    *,
    tied: bool = False,
    vocabulary: int | None = None,
    softcap: float | None = None,
    z_loss: float = 0.0,
    parallelism: Parallelism = SINGLE_DEVICE,
) -> jax.Array:
    """Sum mask * (-log softmax(logits)[target] + z_loss * z^2) over tokens, in at least float32.

    The logits are hidden @ kernel, and z is the log of their softmax's denominator.

    Differentiable (reverse mode) in `hidden`, `kernel` and `mask`. A token whose mask is 0 adds
    exactly 0 to the loss and to every gradient, even where its hidden state is not finite.

    Args:
        hidden: [..., H], after the final norm.
        kernel: [H, V]; [V, H] if `tied`.
        targets: int32 [...].
        mask: float [...], the weight of each token's loss.
        tied: `kernel` is the embedding table.
        vocabulary: size of the vocabulary without padding; None: nothing pads it.
        softcap: see `soft_cap`.
        z_loss: weight of z^2 (Chowdhery et al. 2022, "PaLM", section 5).
        parallelism: how the model is sharded. Where ranks share the vocabulary `kernel` is this
            one's part of it, and both it and `hidden` vary over these ranks. The loss is the same
            on all of them, and the gradient of `hidden` is this rank's share of it.
    """
    axes = varying_axes(hidden, kernel, targets, mask)
    wide = jnp.promote_types(hidden.dtype, jnp.float32)
    tokens = math.prod(targets.shape)
    states = vary_over((hidden.reshape(tokens, -1), kernel), axes)
    labels = targets.reshape(-1), mask.reshape(-1).astype(wide)
    labels = vary_over(labels, axes if parallelism.tensor == 1 else axes - {"tensor"})
    columns = kernel.shape[0 if tied else 1]
    head = _HeadKernel(
        tied,
        columns,
        vocabulary,
        parallelism.vocabulary_axes,
        parallelism.vocabulary_ranks,
        softcap,
        z_loss,
    )
    return _cross_entropy_sum(head, *states, *labels)


def soft_cap(logits: jax.Array, bound: float | None) -> jax.Array:
    """Bound logits smoothly: bound * tanh(logits / bound) (None: not)."""
    return logits if bound is None else bound * jnp.tanh(logits / bound)


class _HeadKernel(NamedTuple):
    tied: bool
    columns: int  # of this rank's kernel
    vocabulary: int | None  # columns that exist, of all ranks together
    axes: tuple[str, ...]  # that number the ranks
    ranks: int
    softcap: float | None
    z_loss: float


class _Chunk(NamedTuple):
    hidden: jax.Array  # [tokens, hidden]
    targets: jax.Array  # [tokens]
    mask: jax.Array  # [tokens]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _cross_entropy_sum(
    head: _HeadKernel, hidden: jax.Array, kernel: jax.Array, targets: jax.Array, mask: jax.Array
) -> jax.Array:
    chunks = token_chunks(_Chunk(hidden, targets, mask), head.columns, mask.dtype.itemsize)

    def add(total: jax.Array, chunk: _Chunk) -> tuple[jax.Array, None]:
        logits = _logits(chunk.hidden, kernel, head)
        losses = _losses(logits, chunk.targets, head)[0]
        return total + _masked_sum(losses, chunk.mask), None

    zero = vary_over(jnp.zeros((), mask.dtype), varying_axes(mask))
    return _scan(add, zero, chunks)[0]


def _forward(
    head: _HeadKernel, hidden: jax.Array, kernel: jax.Array, targets: jax.Array, mask: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array, jax.Array]]:
    hidden, zero = zero_after(hidden)
    chunks = token_chunks(_Chunk(hidden, targets, mask), head.columns, mask.dtype.itemsize)
    wide = mask.dtype

    def add(
        carry: tuple[jax.Array, jax.Array], chunk: _Chunk
    ) -> tuple[tuple[jax.Array, jax.Array], tuple[jax.Array, jax.Array]]:
        total, kernel_gradient = carry
        logits = _logits(chunk.hidden, kernel, head)
        losses, log_sum = _losses(logits, chunk.targets, head)
        counts = chunk.mask[:, None] != 0
        is_target = chunk.targets[:, None] == _own_columns(head)[None, :]
        softmax = jnp.exp(logits - log_sum[:, None])
        if head.z_loss:
            softmax = softmax * (1 + 2 * head.z_loss * log_sum[:, None])
        gradient = (softmax - is_target) * chunk.mask[:, None]
        if head.softcap is not None:  # minus infinity in the padding, where softmax is 0
            share = jnp.maximum(logits / head.softcap, -1)
            gradient = gradient * (1 - jnp.square(share))
        gradient = jnp.where(counts, gradient, 0)
        gradient = gradient.astype(hidden.dtype)
        kernel_side = 1 if head.tied else 0
        hidden_gradient = lax.dot_general(gradient, kernel, (((1,), (1 - kernel_side,)), ((), ())))
        # A masked token's hidden state may be anything, and 0 times infinity is not 0.
        states = jnp.where(counts, chunk.hidden, 0)
        pair = (gradient, states) if head.tied else (states, gradient)
        share = lax.dot_general(*pair, (((0,), (0,)), ((), ())), preferred_element_type=wide)
        total = total + _masked_sum(losses, chunk.mask)
        return (total, kernel_gradient + share), (hidden_gradient, losses)

    no_loss = vary_over(jnp.zeros((), wide), varying_axes(mask))
    carry, outputs = _scan(add, (no_loss, zeros_of(kernel, dtype=wide, zero=zero)), chunks)
    tokens = hidden.shape[0]
    hidden_gradient = outputs[0].reshape(-1, hidden.shape[1])[:tokens]
    losses = outputs[1].reshape(-1)[:tokens]
    return carry[0], (hidden_gradient, carry[1].astype(kernel.dtype), losses)


def _backward(
    head: _HeadKernel, residuals: tuple[jax.Array, jax.Array, jax.Array], cotangent: jax.Array
) -> tuple[jax.Array, jax.Array, None, jax.Array]:
    hidden_gradient, kernel_gradient, losses = residuals
    scale = cotangent.astype(hidden_gradient.dtype)
    return hidden_gradient * scale, kernel_gradient * scale, None, losses * cotangent


_cross_entropy_sum.defvjp(_forward, _backward)


def chunk_plan(tokens: int, columns: int, itemsize: int) -> tuple[int, int]:
    """Split `tokens` tokens into chunks; returns their count and the tokens of each.

    `columns` is the width of the logits on this rank, `itemsize` the bytes of one of them.
    """
    most = max(CHUNK_BYTES // (columns * itemsize), LEAST_CHUNK_TOKENS)
    count = max(1, math.ceil(tokens / most))
    return count, math.ceil(tokens / count)


def token_chunks(tree: Tree, columns: int, itemsize: int) -> Tree:
    """Reshape arrays [tokens, ...] to [chunks, tokens of a chunk, ...], padded with zeros.

    Other arguments are those of `chunk_plan`.
    """
    tokens = jax.tree.leaves(tree)[0].shape[0]
    count, size = chunk_plan(tokens, columns, itemsize)

    def split(x: jax.Array) -> jax.Array:
        padding = [(0, count * size - tokens)] + [(0, 0)] * (x.ndim - 1)
        return jnp.pad(x, padding).reshape(count, size, *x.shape[1:])

    made: Tree = jax.tree.map(split, tree)
    return made


def _scan(
    body: Callable[[Carry, _Chunk], tuple[Carry, Output]], carry: Carry, chunks: _Chunk
) -> tuple[Carry, Output]:
    """Scan over chunks, without a loop where there is one."""
    return lax.scan(body, carry, chunks, unroll=chunks.targets.shape[0] == 1)


def _logits(hidden: jax.Array, kernel: jax.Array, head: _HeadKernel) -> jax.Array:
    """Compute this rank's logits [tokens, columns], minus infinity in the vocabulary's padding."""
    wide = jnp.promote_types(hidden.dtype, jnp.float32)
    dims = (((1,), (1 if head.tied else 0,)), ((), ()))
    logits = lax.dot_general(hidden, kernel, dims, preferred_element_type=wide)
    logits = soft_cap(logits, head.softcap)
    if head.vocabulary is None or head.ranks * head.columns == head.vocabulary:
        return logits
    return jnp.where(_own_columns(head) < head.vocabulary, logits, -jnp.inf)


def _own_columns(head: _HeadKernel) -> jax.Array:
    """Return the vocabulary entries whose logits this rank computes, int32 [columns]."""
    columns = jnp.arange(head.columns, dtype=jnp.int32)
    return columns if head.ranks == 1 else lax.axis_index(head.axes) * head.columns + columns


def _losses(
    logits: jax.Array, targets: jax.Array, head: _HeadKernel
) -> tuple[jax.Array, jax.Array]:
    """Return each token's loss and the log of its softmax's denominator, both [tokens]."""
    top = _over_ranks(lax.pmax, logits.max(-1), head)
    exponentials = jnp.exp(logits - top[:, None]).sum(-1)
    own = targets - _own_columns(head)[0]
    is_local = (own >= 0) & (own < head.columns)
    target_logit = jnp.take_along_axis(logits, jnp.where(is_local, own, 0)[:, None], axis=-1)[:, 0]
    packed = jnp.stack([exponentials, jnp.where(is_local, target_logit, 0)])
    total, target_logit = _over_ranks(lax.psum, packed, head)
    log_sum = top + jnp.log(total)
    losses = log_sum - target_logit
    return losses + head.z_loss * jnp.square(log_sum) if head.z_loss else losses, log_sum


def _over_ranks(
    reduce: Callable[[jax.Array, tuple[str, ...]], jax.Array], x: jax.Array, head: _HeadKernel
) -> jax.Array:
    return reduce(x, head.axes) if head.ranks > 1 else x


def _masked_sum(losses: jax.Array, mask: jax.Array) -> jax.Array:
    return jnp.sum(jnp.where(mask != 0, losses * mask, 0))
