"""The programs that the published times are of, from their papers and recipes.

Nothing here is fitted. Recipes are NVIDIA's dgxc-benchmarking v25.01 (`nemotron/`, `llama3.1/`,
`maxtext/`) and Megatron-LM's examples/sc21/run_table_1.sh.
"""

from geojax.planner.cost.execution import Execution

FLASH_ATTENTION_2 = {"a100-sxm-80gb": 0.62, "a100-sxm-40gb": 0.62, "h100-sxm": 0.35}
"""FlashAttention-2 (Dao 2023): 50 to 73% of an A100's peak; on an H100 35% (Shah et al. 2024,
"FlashAttention-3")."""

MEGATRON_2021 = Execution(
    "Megatron-LM 2021",
    {},
    {},
    fused_attention=False,
    fused_projections=True,
    sums_in_matmul=True,
    late_receives=True,
    reduced_itemsize=4,
)
"""All is recomputed, scores go through memory (before FlashAttention), the sums of gradients are 32
bits wide and follow the pipeline, and sends and receives between stages block (SC21, section 4)."""

NEMO_340B = Execution(
    "NeMo",
    FLASH_ATTENTION_2,
    {"h100-sxm": 0.35},
    fused_projections=True,
    sums_in_matmul=True,
    recomputes=frozenset({"attention"}),
    pipelined_tensor=True,
    overlaps_gather=True,
    overlaps_reduction=True,
    reduced_itemsize=2,
)
"""Heads of 192 dims, which cuDNN's attention did not take (NVTE_FUSED_ATTN=0): FlashAttention-2;
attention is recomputed (activations_checkpoint_granularity: selective); collectives over tensor
pipelined (ub_tp_comm_overlap), gradients in bf16 (grad_sync_dtype), hops and data-parallel messages
beside compute (overlap_p2p_comm, overlap_grad_sync, overlap_param_sync)."""

NEMO = Execution(
    "NeMo",
    {},
    {},
    fused_projections=True,
    sums_in_matmul=True,
    recomputes=frozenset(),
    pipelined_tensor=True,
    overlaps_gather=True,
    overlaps_reduction=True,
    reduced_itemsize=2,
)
"""The same with cuDNN's attention, and nothing recomputed (activations_checkpoint_granularity:
null)."""

MAXTEXT = Execution(
    "MaxText",
    {},
    {},
    recomputes=frozenset({"attention", "up", "elementwise"}),
    overlaps_gather=True,
    overlaps_reduction=True,
    reduced_itemsize=2,
)
"""cuDNN's attention (cudnn_flash_te); query, key, value, output and, in bf16, down projections are
kept, gate and up computed again (save_dot_except_mlpwi; in FP8 save_dot_except_mlp, where the
backward needs the result of down no more than in bf16)."""
