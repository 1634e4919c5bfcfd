"""What both sides train: one model, one text, one optimizer. It imports no framework."""

from wan_sides import work

SITES = ("east", "mid", "west")
ROWS, SEQUENCE, MICROBATCHES = 144, 32, 12
"""Of the global batch; a site takes the same microbatches of its own rows."""
SITE_ROWS = ROWS // len(SITES)
MODEL = work.MODEL | {
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "intermediate_size": 176,
    "vocab_size": 301,
    "max_position_embeddings": SEQUENCE,
}
OPTIMIZER = work.OPTIMIZER | {"peak_learning_rate": 1e-3, "final_learning_rate": 1e-3}
TOKENS_PER_SITE = SITE_ROWS * SEQUENCE
