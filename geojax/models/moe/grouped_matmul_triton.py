"""Grouped matmul as Triton kernels, for GPUs: one program for each tile of the result.

A tile of rows lies in one block, so that a program reads one expert's kernel and nothing is masked
but elements beyond the edge of a matrix. Programs of neighboring tiles run at the same time and
share what they read through the cache: they are numbered down a few rows of tiles before they go on
to the next column.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from geojax.models.parallel.varying import vary_over, varying_axes

_TILE = 128
_INNER_BYTES = 128
"""Bytes of one row of a tile along the contracted dim: 64 numbers of 16 bits."""
_ROWS_OF_TILES = 8


def multiply(
    size: int,
    rows: jax.Array,
    kernels: jax.Array,
    ends: jax.Array,
    *,
    contracting: int,
    interpret: bool = False,
) -> jax.Array:
    """Run `geojax.models.moe.grouped_matmul_loops.multiply`; `interpret` needs no GPU."""
    tile = min(size, _TILE)
    outputs = kernels.shape[2 - contracting]
    row_tiles, column_tiles = rows.shape[0] // tile, -(-outputs // _TILE)
    blocks = jnp.arange(rows.shape[0] // size, dtype=jnp.int32)
    owner = jnp.sum(ends <= blocks[:, None], axis=1, dtype=jnp.int32)
    inner = _inner(rows.dtype)
    wide = jnp.promote_types(rows.dtype, jnp.float32)

    def program(owner_ref: Any, rows_ref: Any, kernels_ref: Any, out_ref: Any) -> None:
        i, j = _tile_of(pl.program_id(0), row_tiles, column_tiles)
        expert = owner_ref[i * tile // size]

        def add(step: jax.Array, total: jax.Array) -> jax.Array:
            own = _load(rows_ref, (i * tile, step * inner), (tile, inner))
            starts, shape = (step * inner, j * _TILE), (inner, _TILE)
            if contracting == 1:
                starts, shape = starts[::-1], shape[::-1]
            kernel = _load(kernels_ref, starts, shape, expert)
            return total + triton.dot(own, kernel, trans_b=contracting == 1)

        # A block that is not used has no expert and gets no step: zeros.
        steps = (expert < kernels.shape[0]).astype(jnp.int32) * -(-rows.shape[1] // inner)
        total = lax.fori_loop(0, steps, add, jnp.zeros((tile, _TILE), wide))
        _store(out_ref, (i * tile, j * _TILE), total)

    return _call(
        program,
        row_tiles * column_tiles,
        (rows.shape[0], outputs),
        (owner, rows, kernels),
        dtype=rows.dtype,
        name="grouped_product",
        interpret=interpret,
    )


def kernels_gradient(
    size: int,
    rows: jax.Array,
    cotangent: jax.Array,
    kernels: jax.Array,
    ends: jax.Array,
    *,
    interpret: bool = False,
) -> jax.Array:
    """Run `geojax.models.moe.grouped_matmul_loops.kernels_gradient`; `interpret` as above."""
    experts, inputs, outputs = kernels.shape
    row_tiles, column_tiles = -(-inputs // _TILE), -(-outputs // _TILE)
    inner = min(size, _inner(rows.dtype))
    wide = jnp.promote_types(rows.dtype, jnp.float32)
    firsts = jnp.concatenate([jnp.zeros_like(ends[:1]), ends[:-1]])

    def program(
        firsts_ref: Any, ends_ref: Any, rows_ref: Any, change_ref: Any, out_ref: Any
    ) -> None:
        expert = pl.program_id(0) // (row_tiles * column_tiles)
        number = pl.program_id(0) % (row_tiles * column_tiles)
        i, j = _tile_of(number, row_tiles, column_tiles)

        def add(step: jax.Array, total: jax.Array) -> jax.Array:
            own = _load(rows_ref, (step * inner, i * _TILE), (inner, _TILE))
            change = _load(change_ref, (step * inner, j * _TILE), (inner, _TILE))
            return total + triton.dot(own, change, trans_a=True)

        steps = size // inner
        total = lax.fori_loop(
            firsts_ref[expert] * steps,
            ends_ref[expert] * steps,
            add,
            jnp.zeros((_TILE, _TILE), wide),
        )
        _store(out_ref, (i * _TILE, j * _TILE), total, expert)

    return _call(
        program,
        experts * row_tiles * column_tiles,
        kernels.shape,
        (firsts, ends, rows, cotangent),
        dtype=kernels.dtype,
        name="grouped_product_gradient",
        interpret=interpret,
    )


def _call(
    program: Any,
    programs: int,
    shape: tuple[int, ...],
    inputs: tuple[jax.Array, ...],
    *,
    dtype: Any,
    name: str,
    interpret: bool,
) -> jax.Array:
    inputs = vary_over(inputs, varying_axes(inputs))
    result = jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=jax.typeof(inputs[0]).mat)
    return pl.pallas_call(
        program,
        out_shape=result,
        grid=(programs,),
        in_specs=[pl.no_block_spec] * len(inputs),
        out_specs=pl.no_block_spec,
        compiler_params=triton.CompilerParams(num_warps=8, num_stages=4),
        name=name,
        interpret=interpret,
    )(*inputs)


def _inner(dtype: Any) -> int:
    return _INNER_BYTES // jnp.dtype(dtype).itemsize


def _tile_of(number: jax.Array, row_tiles: int, column_tiles: int) -> tuple[jax.Array, jax.Array]:
    """Return a program's tile: down `_ROWS_OF_TILES` rows of tiles, then to the next column."""
    in_group = _ROWS_OF_TILES * column_tiles
    group, inside = number // in_group, number % in_group
    height = jnp.minimum(row_tiles - group * _ROWS_OF_TILES, _ROWS_OF_TILES)
    return group * _ROWS_OF_TILES + inside % height, inside // height


def _load(
    ref: Any, starts: tuple[Any, Any], shape: tuple[int, int], *leading: jax.Array
) -> jax.Array:
    """Load a tile of the last two dims of `ref`, 0 beyond their ends."""
    inside = _inside(ref.shape[-2:], starts, shape)
    where = ref.at[(*leading, *map(pl.ds, starts, shape))]
    return triton.load(where) if inside is None else triton.load(where, mask=inside, other=0.0)


def _store(ref: Any, starts: tuple[Any, Any], tile: jax.Array, *leading: jax.Array) -> None:
    inside = _inside(ref.shape[-2:], starts, tile.shape)
    where = ref.at[(*leading, *map(pl.ds, starts, tile.shape))]
    triton.store(where, tile.astype(ref.dtype), mask=inside)


def _inside(
    limits: tuple[int, int], starts: tuple[Any, Any], shape: tuple[int, ...]
) -> jax.Array | None:
    """Mask the part of a tile inside a matrix; None if the sizes put all of it inside."""
    inside = None
    for dim, (limit, start, size) in enumerate(zip(limits, starts, shape, strict=True)):
        if limit % size:
            here = lax.broadcasted_iota(jnp.int32, shape, dim) < limit - start
            inside = here if inside is None else inside & here
    return inside
