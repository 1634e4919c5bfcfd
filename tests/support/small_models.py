"""Small models of each family and batches for them, made without the data pipeline."""

import functools

import jax
import numpy as np

from geojax.models import ModelConfig, init_parameters

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
        "hidden_act": "gelu_pytorch_tanh",
        "position_embedding_type": "learned_absolute",
        "qkv_bias": True,
        "attention_output_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": True,
        "dropout": 0.1,
    },
    "llama": {"norm": "rmsnorm", "hidden_act": "silu", "num_key_value_heads": 1},
    "nemotron": {
        "norm": "layernorm1p",
        "hidden_act": "relu2",
        "rope_parameters": {"partial_rotary_factor": 0.5},
        "tie_word_embeddings": False,
    },
}


def model_of(family):
    sizes = {
        "num_hidden_layers": 3,
        "hidden_size": 20,
        "num_attention_heads": 2,
        "head_dim": 8,
        "intermediate_size": 36,
    }
    return ModelConfig(**sizes, vocab_size=61, max_position_embeddings=64, **FAMILIES[family])


def drawn_parameters(model, dtype=np.float32, seed=1):
    """Initial parameters, from one program: op by op each shape would be compiled for."""
    initial = functools.partial(init_parameters, model, dtype=dtype)
    return jax.jit(initial)(jax.random.key(seed))


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
    tokens = model.vocab_size * generator.random((rows, sequence + 1)) ** 4
    return {
        "tokens": tokens[:, :-1].astype(np.int32),
        "targets": tokens[:, 1:].astype(np.int32),
        "loss_mask": (generator.random((rows, sequence)) < 0.8).astype(np.float32),
        "segment_ids": segment_ids.astype(np.int32),
        "positions": positions,
        "row": np.arange(rows, dtype=np.int32),
    }
