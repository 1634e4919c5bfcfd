"""Classes of JAX's primitives by what a compiler does with them in memory.

Every other primitive is elementwise (or copies, broadcasts, slices) and is fused into its readers.
"""

LOOPS = frozenset(("scan", "while"))
"""Loops, which hold their carry and run a body."""

COLLECTIVES = frozenset(
    (
        "all_gather",
        "all_gather_invariant",
        "all_gather_reduced",
        "all_to_all",
        "pmax",
        "pmin",
        "ppermute",
        "psum",
        "psum_invariant",
        "ragged_all_to_all",
        "reduce_scatter",
        "unreduced_reduce_scatter",
    )
)
"""Collectives, which send between devices."""

READS_MEMORY = (
    LOOPS
    | COLLECTIVES
    | frozenset(
        (
            "argsort",
            "cond",
            "cumlogsumexp",
            "cummax",
            "cumprod",
            "cumsum",
            "custom_call",
            "custom_vmap_call",  # a Mosaic GPU kernel
            "dot_general",
            "ffi_call",
            "mpmd_map",
            "pallas_call",
            "pure_callback",
            "ragged_dot",
            "ragged_dot_general",
            "scatter",
            "scatter-add",
            "sort",
            "top_k",
        )
    )
)
"""Primitives that run by themselves: their operands and results lie in memory."""

RENAMES = frozenset(
    (
        "after",
        "barrier",
        "bitcast_convert_type",
        "copy",
        "copy_p",
        "drop_single",
        "expand_dims",
        "layout_constraint",
        "name",
        "optimization_barrier",
        "pcast",
        "pvary",
        "reshape",
        "squeeze",
        "stop_gradient",
        "transpose",
    )
)
"""Primitives that give the same bytes another name, shape or type."""

BARRIERS = frozenset(("barrier", "optimization_barrier"))
"""Primitives whose operands lie in memory, under another name."""

IN_PLACE = frozenset(("dynamic_update_slice", "scatter", "scatter-add"))
"""Primitives that change a few entries of an operand, in place where nothing else reads it."""

REDUCES = frozenset(
    (
        "argmax",
        "argmin",
        "reduce",
        "reduce_and",
        "reduce_max",
        "reduce_min",
        "reduce_or",
        "reduce_prod",
        "reduce_sum",
    )
)
"""Reductions: their operands are fused into them, but their results lie in memory."""

EXPENSIVE = frozenset(
    (
        "cos",
        "div",
        "erf",
        "exp",
        "exp2",
        "expm1",
        "log",
        "log1p",
        "logistic",
        "pow",
        "random_bits",
        "rem",
        "rsqrt",
        "sin",
        "sqrt",
        "tanh",
        "threefry2x32",
    )
)
"""Primitives computed once for all readers; a cheaper one is computed again for each."""
