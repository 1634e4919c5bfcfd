"""Packing of documents: windows of a token stream to inputs, targets, segments and a loss mask."""

from typing import NamedTuple

import numpy as np

from geojax.data.tokenizer import Tokenizer

Batch = dict[str, np.ndarray]


class Window(NamedTuple):
    """Tokens of a stream, one after the other: arrays [n], or of B windows [B, n]."""

    tokens: np.ndarray
    """int32."""
    begins: np.ndarray
    """bool: the token begins a document."""
    counts: np.ndarray
    """bool: the loss counts the token as a target."""


def window_of_tokens(tokens: np.ndarray, tokenizer: Tokenizer) -> Window:
    """Return the window of tokens whose documents lie between the tokenizer's two tokens.

    The loss does not count a token that begins a document, which nothing before it can predict. (If
    one token both ends and begins documents it does count, as the end.)
    """
    begins = tokens == tokenizer.bos_id
    counts = np.ones_like(begins) if tokenizer.bos_id == tokenizer.eos_id else ~begins
    return Window(tokens, begins, counts)


def marked_values(window: Window) -> np.ndarray:
    """Write a window's marks into the two lowest bits of its values."""
    return window.tokens * 4 + window.begins * 2 + window.counts


def window_of_marked(values: np.ndarray) -> Window:
    """Return the window that `marked_values` has written."""
    return Window(values >> 2, (values & 2).astype(bool), (values & 1).astype(bool))


def pack(window: Window) -> Batch:
    """Split windows into inputs and targets, and mark the boundaries of documents.

    Args:
        window: S + 1 tokens of each of B sequences; the last one is only a target.

    Returns:
        tokens, targets, segment_ids, positions: int32 [B, S]; loss_mask: float32 [B, S]. A document
        that began before the window is its first segment, from position 0 on.
    """
    tokens, targets = window.tokens[:, :-1], window.tokens[:, 1:]
    begins = window.begins[:, :-1].copy()
    begins[:, 0] = True
    index = np.arange(tokens.shape[1], dtype=np.int32)
    beginnings = np.maximum.accumulate(np.where(begins, index, 0), axis=1)
    return {
        "tokens": np.ascontiguousarray(tokens, np.int32),
        "targets": np.ascontiguousarray(targets, np.int32),
        "loss_mask": window.counts[:, 1:].astype(np.float32),
        "segment_ids": np.cumsum(begins, axis=1, dtype=np.int32),
        "positions": (index - beginnings).astype(np.int32),
    }


def pad(batch: Batch, lengths: np.ndarray) -> Batch:
    """Turn all positions from `lengths` [B] on into padding: segment 0, no loss."""
    real = np.arange(batch["tokens"].shape[1]) < lengths[:, None]
    return {name: np.where(real, values, 0).astype(values.dtype) for name, values in batch.items()}
