"""Names of other trainers for the keys and values of a run's config, and geojax's own for each.

People type the names of Megatron-LM, MaxText, torchtitan, DeepSpeed and Hugging Face. geojax
accepts none of them: a config has one name for each key. A refusal names the key that is meant.
"""

from collections.abc import Mapping

from geojax.suggestions import ForeignNames

_KEYS = {
    "mesh.data": (
        "dp dp_size data_parallel data_parallel_size data_parallel_shard_degree fsdp_size "
        "ici_data_parallelism ici_fsdp_parallelism"
    ),
    "mesh.dc": "data_parallel_replicate_degree dcn_data_parallelism num_slices",
    "zero.stage=3 (data-parallel ranks are mesh.data)": "fsdp",
    "zero.stage=3 (sites are mesh.dc)": "hsdp",
    "zero.across_sites=true": "dcn_fsdp_parallelism",
    "mesh.dc (with dc.role=stage)": "dcn_pipeline_parallelism",
    "mesh.tensor": (
        "tp tp_size tensor_parallel tensor_parallel_size tensor_parallel_degree "
        "tensor_model_parallel_size model_parallel_size ici_tensor_parallelism"
    ),
    "mesh.stage": (
        "pp pp_size pipeline_parallel pipeline_parallel_size pipeline_parallel_degree "
        "pipeline_model_parallel_size ici_pipeline_parallelism"
    ),
    "mesh.context": (
        "cp cp_size context_parallel_size context_parallel_degree ici_context_parallelism "
        "ring_attention"
    ),
    "parallelism.context_method": "cp_comm_type",
    "mesh.expert": (
        "ep ep_size expert_parallel_size expert_parallel_degree expert_model_parallel_size "
        "ici_expert_parallelism"
    ),
    "parallelism.sequence": "sp sequence_parallel",
    "mesh.data (the product of the axes of mesh is the number of devices)": "num_devices",
    "pipeline.virtual_stages": "vpp virtual_pipeline_model_parallel_size",
    "pipeline.virtual_stages (chunks, not layers)": "num_layers_per_virtual_pipeline_stage",
    "pipeline.schedule": "pipeline_parallel_schedule",
    "zero.stage": "zero_stage zero_optimization",
    "zero.stage=1": "use_distributed_optimizer shard_optimizer_state",
    "zero.reshard_after_forward": "fsdp_reshard_after_forward",
    "communication.overlap_grad_reduce": "overlap_comm",
    "communication.overlap_param_gather": "overlap_params_gather",
    "communication.bucket_bytes": "reduce_bucket_size ddp_bucket_size bucket_cap_mb",
    "batch.global_batch_size": "bs batch_size train_batch_size",
    "batch.global_batch_size (of a step, over all devices and microbatches)": (
        "per_device_batch_size per_device_train_batch_size local_batch_size"
    ),
    "batch.microbatches (their number, not their size)": (
        "micro_batch_size microbatch_size train_micro_batch_size_per_gpu"
    ),
    "batch.microbatches": (
        "grad_accum grad_accum_steps gradient_accumulation gradient_accumulation_steps "
        "num_microbatches num_pipeline_microbatches"
    ),
    "batch.sequence_length": (
        "seq_len seq_length max_seq_len max_seq_length max_length max_target_length block_size "
        "context_length"
    ),
    "steps": "max_steps num_steps num_train_steps train_steps total_steps train_iters iterations",
    "steps (steps x batch.global_batch_size sequences are read)": (
        "epochs num_epochs num_train_epochs train_samples"
    ),
    "steps (of global_batch_size x sequence_length tokens each)": "max_tokens",
    "optimizer.peak_learning_rate": "lr learning_rate max_lr peak_lr",
    "optimizer.final_learning_rate": "min_lr lr_min end_lr",
    "optimizer.warmup_steps": "warmup lr_warmup_iters num_warmup_steps warmup_iters",
    "optimizer.warmup_steps (a number of steps)": (
        "warmup_ratio lr_warmup_fraction warmup_steps_fraction"
    ),
    "optimizer.decay_steps": "lr_decay_iters lr_decay_steps learning_rate_schedule_steps",
    "optimizer.wsd_decay_steps": "lr_wsd_decay_iters",
    "optimizer.schedule": "lr_scheduler lr_scheduler_type lr_schedule lr_decay_style scheduler",
    "optimizer.name": "optim opt_type optimizer_type",
    "optimizer.weight_decay": "wd adam_weight_decay",
    "optimizer.beta1": "adam_beta1 adam_b1",
    "optimizer.beta2": "adam_beta2 adam_b2",
    "optimizer.beta1 (and optimizer.beta2)": "betas",
    "optimizer.epsilon": "eps adam_eps adam_epsilon",
    "optimizer.clip_norm": (
        "grad_clip clip_grad max_norm max_grad_norm gradient_clipping gradient_clip_val "
        "gradient_clipping_threshold"
    ),
    "optimizer.ema_decay": "ema",
    "precision": "dtype weight_dtype torch_dtype mixed_precision",
    "precision=bf16": "bf16",
    "precision=fp16": "fp16",
    "precision=fp32": "fp32",
    "precision=fp8-current": "fp8_format fp8_recipe quantization",
    "remat=full": "gradient_checkpointing",
    "remat": "activation_checkpoint activation_checkpointing recompute_granularity remat_policy",
    "remat=selective": "recompute_activations",
    "model": "model_name model_id",
    "model.huggingface": "model_name_or_path pretrained_model_name_or_path",
    "initial_weights": "load_parameters_path finetune_from",
    "model.num_hidden_layers": "num_layers n_layer n_layers base_num_decoder_layers",
    "model.hidden_size": "d_model dim n_embd base_emb_dim",
    "model.intermediate_size": "d_ff n_inner base_mlp_dim ffn_hidden_size",
    "model.num_attention_heads": "n_head n_heads num_heads base_num_query_heads",
    "model.num_key_value_heads": "n_kv_heads num_kv_heads num_query_groups base_num_kv_heads",
    "model.max_position_embeddings": "n_positions n_ctx",
    "model.rms_norm_eps": "norm_epsilon layernorm_epsilon",
    "model.rope_parameters.rope_theta": "rope_theta rotary_base",
    "model.rope_parameters": "rope_scaling",
    "model.hidden_act": "activation_function",
    "model.hidden_act=silu": "swiglu",
    "model.tie_word_embeddings": "tied_embeddings logits_via_embedding",
    "model.initializer_range": "init_method_std",
    "model.num_experts_per_tok": "moe_router_topk top_k_experts",
    "model.num_experts": "num_local_experts n_routed_experts",
    "model.moe_intermediate_size": "moe_ffn_hidden_size",
    "model.router_aux_loss_coef": "moe_aux_loss_coeff",
    "model.lora.rank": "lora_r lora_rank",
    "model.lora.alpha": "lora_alpha",
    "data.sources": "dataset dataset_name dataset_path data_path train_data",
    "data.tokenizer": "tokenizer tokenizer_path tokenizer_model",
    "seed": "random_seed",
    "evaluation.interval": "eval_steps eval_interval",
    "evaluation.sequences": "eval_iters",
    "run_directory": "output_dir out_dir dump_folder base_output_directory save_dir save",
    "checkpoint.interval": "save_steps save_interval checkpoint_period checkpoint_interval",
    "checkpoint.keep": "save_total_limit max_to_keep",
}
"""Other names, divided by blanks, by the key that is meant, with its value or a remark."""

_VALUES: Mapping[str, Mapping[str, str]] = {
    "precision": {
        "bf16": "bfloat16 torch.bfloat16 bf16-mixed",
        "fp16": "float16 half torch.float16",
        "fp32": "float32 float single tf32 32",
        "fp64": "float64 double",
        "fp8-current": "fp8 float8 e4m3 hybrid tensorwise",
        "fp8-delayed": "delayed",
        "fp8-block": "blockwise",
        "fp8-mxfp8": "mxfp8",
    },
    "optimizer.name": {
        "adamw": "adam adamw-torch adamw-torch-fused fused-adam fusedadam adam-pax",
        "schedule_free_adamw": "schedule-free adamwschedulefree",
    },
    "optimizer.schedule": {
        "cosine": "cosine-with-warmup cosine-annealing",
        "wsd": "warmup-stable-decay",
        "constant": "constant-with-warmup",
        "inverse_sqrt": "inverse-square-root noam",
    },
    "remat": {
        "full": "true",
        "selective": "minimal",
        "none": "false off null",
    },
    "pipeline.schedule": {
        "interleaved": "interleaved1f1b interleaved-1f1b",
        "zero_bubble_h1": "zb-h1 zbh1",
        "zero_bubble_h2": "zb-h2",
        "zbv": "zbvzerobubble zb-v dualpipev",
    },
    "parallelism.context_method": {
        "ring": "p2p",
        "ulysses": "a2a all-to-all",
        "all_gather": "allgather all-gather",
    },
    "communication.gradient_compression": {
        "bf16": "bfloat16",
        "int8": "fp8 powersgd",
    },
}
"""Other names by the value that is meant, by key."""


def _by_name(names: Mapping[str, str]) -> dict[str, str]:
    return {name: meant for meant, text in names.items() for name in text.split()}


FOREIGN_NAMES = ForeignNames(
    _by_name(_KEYS), {key: _by_name(names) for key, names in _VALUES.items()}
)
"""The names that `geojax train` answers with the key or the value that is meant."""
