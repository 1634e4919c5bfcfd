"""What a compiler does with JAX's primitives, as far as memory is concerned.

All that is not named here is computed element by element (or copies, broadcasts, slices) and joins
what reads it.
"""

LOOPS = frozenset(("scan", "while"))
"""Hold what they carry and run a body."""

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
"""Send between devices."""

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
            "dot_general",
            "ffi_call",
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
"""Run as themselves: their operands lie in memory, and so do their results."""

RENAMES = frozenset(
    (
        "after",
        "bitcast_convert_type",
        "copy",
        "copy_p",
        "drop_single",
        "expand_dims",
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
"""Give the same bytes another name, shape or type."""

IN_PLACE = frozenset(("dynamic_update_slice", "scatter", "scatter-add"))
"""Change a few entries of an operand, in its place if nobody else reads it."""

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
"""Compute their operands on the way, but have results in memory."""

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
"""Computed once, however many read them; what is cheaper is computed again for each reader."""
