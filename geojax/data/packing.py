"""Packing of documents: windows of a token stream to inputs, targets, segments and a loss mask."""

import numpy as np

from geojax.data.tokenizer import Tokenizer

Batch = dict[str, np.ndarray]


def pack(windows: np.ndarray, tokenizer: Tokenizer) -> Batch:
    """Split `windows` into inputs and targets, and mark the boundaries of documents.

    Args:
        windows: [B, S + 1] tokens of B sequences; the last one of a window is only a target.
        tokenizer: the tokenizer, which defines the token that begins a document.

    Returns:
        tokens, targets, segment_ids, positions: int32 [B, S]; loss_mask: float32 [B, S]. A document
        that began before the window is its first segment, from position 0 on. The loss does not
        count where the target begins a document, which nothing before it can predict. (If one token
        both ends and begins documents it does count, as the end.)
    """
    tokens, targets = windows[:, :-1], windows[:, 1:]
    begins = tokens == tokenizer.bos_id
    begins[:, 0] = True
    index = np.arange(tokens.shape[1], dtype=np.int32)
    beginnings = np.maximum.accumulate(np.where(begins, index, 0), axis=1)
    if tokenizer.bos_id == tokenizer.eos_id:
        counts = np.ones(targets.shape, bool)
    else:
        counts = targets != tokenizer.bos_id
    return {
        "tokens": np.ascontiguousarray(tokens, np.int32),
        "targets": np.ascontiguousarray(targets, np.int32),
        "loss_mask": counts.astype(np.float32),
        "segment_ids": np.cumsum(begins, axis=1, dtype=np.int32),
        "positions": (index - beginnings).astype(np.int32),
    }


def pad(batch: Batch, lengths: np.ndarray) -> Batch:
    """Turn all positions from `lengths` [B] on into padding: segment 0, no loss."""
    real = np.arange(batch["tokens"].shape[1]) < lengths[:, None]
    return {name: np.where(real, values, 0).astype(values.dtype) for name, values in batch.items()}
