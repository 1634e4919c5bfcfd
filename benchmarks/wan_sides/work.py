"""What all contestants train: one model, one batch, one optimizer. It imports no framework."""

import numpy as np

SITES = ("east", "west")
ROWS, SEQUENCE = 8, 128
MICROBATCHES = 8
"""Of a pipeline; one row each."""

MODEL = {
    "num_hidden_layers": 8,
    "hidden_size": 512,
    "num_attention_heads": 8,
    "intermediate_size": 1408,
    "vocab_size": 2048,
    "max_position_embeddings": SEQUENCE,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_theta": 10_000.0},
}
OPTIMIZER = {
    "peak_learning_rate": 3e-4,
    "final_learning_rate": 3e-4,
    "warmup_steps": 0,
    "beta1": 0.9,
    "beta2": 0.95,
    "epsilon": 1e-8,
    "weight_decay": 0.1,
    "clip_norm": 1.0,
}
SEED = 0
TOKENS_PER_BATCH = ROWS * SEQUENCE
CORE_FLOPS_PER_SECOND = 130e9
"""About the peak of a core in fp32, for the choice of orders of work."""
STEPS = 1_000_000
"""Of the learning rate's schedule, which is flat; nobody trains so long."""


def parameter_count() -> int:
    hidden, vocabulary = MODEL["hidden_size"], MODEL["vocab_size"]
    layer = 4 * hidden**2 + 3 * hidden * MODEL["intermediate_size"] + 2 * hidden
    return int(MODEL["num_hidden_layers"] * layer + 2 * vocabulary * hidden + hidden)


def layers_of_chunks(chunks: int) -> list[int]:
    """The same share of the layers for each chunk of a pipeline."""
    layers = int(MODEL["num_hidden_layers"])
    assert layers % chunks == 0, f"{layers} layers do not divide into {chunks} chunks"
    return [layers // chunks] * chunks


def batch(repeats: int = 1) -> dict[str, np.ndarray]:
    """Random tokens, one document a row; the same batch every step.

    Of longer steps it has the same rows several times, so that losses and gradients, which are
    means, are those of the others.
    """
    rows = repeats * ROWS
    shape = (rows, SEQUENCE)
    tokens = np.random.default_rng(SEED).integers(
        int(MODEL["vocab_size"]), size=(ROWS, SEQUENCE + 1), dtype=np.int32
    )
    tokens = np.tile(tokens, (repeats, 1))
    return {
        "tokens": tokens[:, :-1],
        "targets": tokens[:, 1:],
        "loss_mask": np.ones(shape, np.float32),
        "segment_ids": np.ones(shape, np.int32),
        "positions": np.broadcast_to(np.arange(SEQUENCE, dtype=np.int32), shape),
        "row": np.arange(rows, dtype=np.int32),
    }
