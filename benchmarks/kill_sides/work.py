"""What both sides train: one model, one text, one optimizer. It imports no framework."""

SITES = ("east", "mid", "west")
ROWS, SEQUENCE, MICROBATCHES = 144, 32, 12
"""Of the global batch; a site takes the same microbatches of its own rows."""
SITE_ROWS = ROWS // len(SITES)
MODEL = {
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "intermediate_size": 176,
    "vocab_size": 301,
    "max_position_embeddings": SEQUENCE,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_theta": 10_000.0},
}
OPTIMIZER = {
    "peak_learning_rate": 1e-3,
    "final_learning_rate": 1e-3,
    "warmup_steps": 0,
    "beta1": 0.9,
    "beta2": 0.95,
    "epsilon": 1e-8,
    "weight_decay": 0.1,
    "clip_norm": 1.0,
}
TOKENS_PER_SITE = SITE_ROWS * SEQUENCE
