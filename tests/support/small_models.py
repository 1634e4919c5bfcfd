"""Small models of each family and batches for them, made without the data pipeline."""

import numpy as np

from geojax.models import ModelConfig

ROWS, SEQUENCE = 24, 32

LAYOUTS = {
    "dc1-data8": ({"data": 8}, 1),
    "dc2-data4": ({"dc": 2, "data": 4}, 1),
    "dc4-data2": ({"dc": 4, "data": 2}, 1),
    "dc3-data2": ({"dc": 3, "data": 2}, 1),
    "dc2-data2-accumulation2": ({"dc": 2, "data": 2}, 2),
    "dc2-data2-expert2": ({"dc": 2, "data": 2, "expert": 2}, 1),
    "dc1-data3-accumulation4": ({"data": 3}, 4),
}

FAMILIES = {
    # Sizes that do not divide over 3, 4 or 8 ranks, so that padding is at work everywhere.
    "gpt3": {
        "norm": "layernorm",
        "activation": "gelu",
        "positions": "learned",
        "biases": True,
        "tied_head": True,
        "dropout": 0.1,
    },
    "llama": {"norm": "rmsnorm", "activation": "swiglu", "key_value_heads": 1},
    "nemotron": {
        "norm": "layernorm1p",
        "activation": "squared_relu",
        "rotary_fraction": 0.5,
        "tied_head": False,
    },
}


def model_of(family):
    sizes = {"layers": 3, "hidden": 20, "heads": 2, "head_dim": 8, "feed_forward": 36}
    return ModelConfig(**sizes, vocabulary=61, maximum_positions=64, **FAMILIES[family])


def make_batch(model, seed=0, rows=ROWS, sequence=SEQUENCE):
    """Random tokens in packed documents of random lengths, some positions without loss."""
    generator = np.random.default_rng(seed)
    starts = generator.random((rows, sequence)) < 0.1
    segment_ids = 1 + np.cumsum(starts, axis=1)
    positions = np.empty((rows, sequence), np.int32)
    for row in range(rows):
        for place in range(sequence):
            first = place == 0 or segment_ids[row, place] != segment_ids[row, place - 1]
            positions[row, place] = 0 if first else positions[row, place - 1] + 1
    # Some tokens are much likelier than others: there is something to learn.
    tokens = model.vocabulary * generator.random((rows, sequence + 1)) ** 4
    return {
        "tokens": tokens[:, :-1].astype(np.int32),
        "targets": tokens[:, 1:].astype(np.int32),
        "loss_mask": (generator.random((rows, sequence)) < 0.8).astype(np.float32),
        "segment_ids": segment_ids.astype(np.int32),
        "positions": positions,
        "row": np.arange(rows, dtype=np.int32),
    }
