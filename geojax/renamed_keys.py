"""Config keys and values of earlier versions, and their successors.

An old name is an error that names the new one, in a file, a preset or an override. Keys are dotted,
below the settings class that holds the mapping as its `renamed_keys` or `renamed_values`.
"""

MODEL_KEYS = {
    "layers": "num_hidden_layers",
    "hidden": "hidden_size",
    "heads": "num_attention_heads",
    "key_value_heads": "num_key_value_heads",
    "feed_forward": "intermediate_size",
    "vocabulary": "vocab_size",
    "maximum_positions": "max_position_embeddings",
    "norm_epsilon": "rms_norm_eps",
    "activation": "hidden_act",
    "positions": "position_embedding_type",
    "rotary_fraction": "rope_parameters.partial_rotary_factor",
    "rotary_base": "rope_parameters.rope_theta",
    "rotary_scaling": "rope_parameters",
    "rotary_scaling.factor": "rope_parameters.factor",
    "rotary_scaling.low_frequency_factor": "rope_parameters.low_freq_factor",
    "rotary_scaling.high_frequency_factor": "rope_parameters.high_freq_factor",
    "rotary_scaling.original_positions": "rope_parameters.original_max_position_embeddings",
    "biases": "qkv_bias, attention_output_bias and mlp_bias",
    "tied_head": "tie_word_embeddings",
    "initial_deviation": "initializer_range",
    "mixture": "num_experts",
    "mixture.experts": "num_experts",
    "mixture.experts_per_token": "num_experts_per_tok",
    "mixture.shared_experts": "n_shared_experts",
    "mixture.normalised_gates": "norm_topk_prob",
    "mixture.capacity_factor": "capacity_factor",
    "mixture.balance_coefficient": "router_aux_loss_coef",
}
"""Keys of `geojax.models.ModelConfig`."""

MODEL_VALUES = {
    ("hidden_act", "swiglu"): "silu",
    ("hidden_act", "gelu"): "gelu_pytorch_tanh",
    ("hidden_act", "squared_relu"): "relu2",
    ("position_embedding_type", "learned"): "learned_absolute",
    ("position_embedding_type", "rotary"): "rope",
}
"""Values of `geojax.models.ModelConfig`, by today's key."""

RUN_KEYS = {
    "batch.rows": "batch.global_batch_size",
    "batch.sequence": "batch.sequence_length",
    "batch.accumulation": "batch.microbatches",
    "zero.keep_gathered": "zero.reshard_after_forward (its opposite)",
    "communication.wire": "communication.gradient_compression",
    "communication.overlap": "communication.overlap_grad_reduce",
    "communication.overlap_layers": "communication.bucket_layers",
    "communication.chunk_bytes": "communication.bucket_bytes",
    "fp8.plain_layers": "fp8.num_bf16_layers_per_end",
    "fp8.sites_share_scales": "fp8.share_amax_across_dc",
    "evaluation.every_steps": "evaluation.interval",
    "evaluation.rows": "evaluation.sequences",
    "checkpoint.every_steps": "checkpoint.interval",
    "checkpoint.every_minutes": "checkpoint.interval_minutes",
    "data.vocabulary_size": "data.vocab_size",
    "sample.tokens": "sample.max_new_tokens",
    "pipeline.dc_role": "dc.role",
    "pipeline.chunks": "pipeline.virtual_stages",
}
"""Keys of `geojax.config.run_config.RunConfig`; those of its `model` are `MODEL_KEYS`."""

PREPARE_KEYS = {"vocabulary_size": "vocab_size"}
"""Keys of `geojax.data.PrepareSettings`."""

PREPARE_SOURCE_KEYS = {"hold_out": "validation_fraction"}
"""Keys of `geojax.data.PrepareSource`."""

RUN_VALUES = {
    ("communication.gradient_compression", "fp32"): "none",
    ("pipeline.schedule", "one_f_one_b"): "1f1b",
    ("pipeline.schedule", "extended_warmup"): "geopipe",
}
"""Values of `geojax.config.run_config.RunConfig`, by today's key."""
