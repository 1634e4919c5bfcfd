"""Grouped matmul as Mosaic GPU kernels, for Hopper GPUs: each core walks tiles of the result.

A tile of rows lies in one block, so that it needs one expert's kernel and nothing is masked. One
warpgroup of a core copies what is multiplied next to shared memory, and each of the others
multiplies 64 rows of the tile. Cores are at neighboring tiles at the same time and share what they
read through the cache.

XLA has no such matmul: it runs `jax.lax.ragged_dot` as a product of every row with every expert's
kernel (`benchmarks/grouped_matmul.py` compiles the alternatives for an H100). Pallas's Triton
backend, which runs on other GPUs too, goes away (it is deprecated since JAX 0.11).
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from geojax.collectives.axes import vary_over, varying_axes

ROWS = 64
"""Rows that a warpgroup multiplies at once: a block has a multiple of them."""

_SWIZZLE_BYTES = 128
"""Bytes of a row in shared memory, whose banks the hardware swizzles."""
_STEP = 64
"""Length of the contracted dim that is multiplied at once: numbers of 16 bits in such a row."""
_STEPS_IN_FLIGHT = 4
_LARGEST_TILE = 128
_TILES_IN_ROW = 8
"""Tiles next to each other before the walk goes on to the next row of tiles."""
_COPY_REGISTERS = 40
"""Registers of a thread that copies; those that multiply have the rest."""
_CORES = 132
"""Cores of an H100 or H200, each of which starts one program; fewer cores take turns."""

_Tile: TypeAlias = tuple[int, int]


class _Steps(NamedTuple):
    """One tile of the result: sums over `times` steps of products of the operands' tiles."""

    times: jax.Array
    left: Callable[[jax.Array], tuple[Any, Any]]
    """Position of the left operand's tile in a step, in tiles."""
    right: Callable[[jax.Array], tuple[Any, Any]]
    """Position of the right operand's tile."""
    expert: jax.Array | None = None
    """First index of a right operand that has three dims."""


def multiply(
    size: int,
    rows: jax.Array,
    kernels: jax.Array,
    ends: jax.Array,
    *,
    contracting: int,
    interpret: Any = None,
) -> jax.Array:
    """Run `geojax.models.moe.grouped_matmul_loops.multiply` on operands of 16 bits.

    `size` is a multiple of `ROWS`; `interpret` (JAX's `InterpretGPUParams`) needs no GPU.
    """
    outputs = kernels.shape[2 - contracting]
    rows, kernels = _pad(rows, 1), _pad(kernels, 1, 2)
    blocks = jnp.arange(rows.shape[0] // size, dtype=jnp.int32)
    owner = jnp.sum(ends <= blocks[:, None], axis=1, dtype=jnp.int32)
    experts, columns = kernels.shape[0], kernels.shape[2 - contracting]
    height, width = min(size, _LARGEST_TILE), _tile(columns)

    def steps_of(owner_ref: Any, _: jax.Array, i: jax.Array, j: jax.Array) -> _Steps:
        expert = owner_ref[lax.div(i * height, jnp.int32(size))]
        # A block that is not used has no expert and gets no step: zeros.
        return _Steps(
            jnp.where(expert < experts, rows.shape[1] // _STEP, 0),
            lambda step: (i, step),
            lambda step: (j, step) if contracting else (step, j),
            jnp.minimum(expert, experts - 1),
        )

    product = _walk(
        steps_of,
        (owner,),
        (rows, kernels),
        ((height, _STEP), (width, _STEP) if contracting else (_STEP, width)),
        (False, bool(contracting)),
        jax.ShapeDtypeStruct((1, rows.shape[0], columns), rows.dtype),
        name="grouped_product",
        interpret=interpret,
    )
    return product[0, :, :outputs]


def kernels_gradient(
    size: int,
    rows: jax.Array,
    cotangent: jax.Array,
    kernels: jax.Array,
    ends: jax.Array,
    *,
    interpret: Any = None,
) -> jax.Array:
    """Run `geojax.models.moe.grouped_matmul_loops.kernels_gradient`; the rest as above."""
    experts, inputs, outputs = kernels.shape
    rows, cotangent = _pad(rows, 1), _pad(cotangent, 1)
    firsts = jnp.concatenate([jnp.zeros_like(ends[:1]), ends[:-1]])
    steps = size // _STEP  # of a block
    height, width = _tile(rows.shape[1]), _tile(cotangent.shape[1])

    def steps_of(
        firsts_ref: Any, ends_ref: Any, expert: jax.Array, i: jax.Array, j: jax.Array
    ) -> _Steps:
        first = firsts_ref[expert] * steps
        return _Steps(
            ends_ref[expert] * steps - first,
            lambda step: (first + step, i),
            lambda step: (first + step, j),
        )

    gradient = _walk(
        steps_of,
        (firsts, ends),
        (rows, cotangent),
        ((_STEP, height), (_STEP, width)),
        (True, False),
        jax.ShapeDtypeStruct((experts, rows.shape[1], cotangent.shape[1]), kernels.dtype),
        name="grouped_product_gradient",
        interpret=interpret,
    )
    return gradient[:, :inputs, :outputs]


def _walk(
    steps_of: Callable[..., _Steps],
    scalars: tuple[jax.Array, ...],
    operands: tuple[jax.Array, jax.Array],
    tiles: tuple[_Tile, _Tile],
    transposed: tuple[bool, bool],
    result: jax.ShapeDtypeStruct,
    *,
    name: str,
    interpret: Any,
) -> jax.Array:
    """Compute [G, M, N] tile by tile.

    Args:
        steps_of: called with references to the scalars, and with the tile's index in G, M and N.
        scalars: arrays of numbers that `steps_of` reads.
        operands: the left one [.., ..] and the right one, which may have a leading dim.
        tiles: shape of each operand's tile of one step.
        transposed: for each operand, if its tile is the transpose of what is multiplied.
        result: the result's shape and dtype.
        name: name of the kernel in HLO and profiles.
        interpret: None, or how to interpret the kernel.
    """
    height, width = tiles[0][transposed[0]], tiles[1][not transposed[1]]
    groups, counts = result.shape[0], (result.shape[1] // height, result.shape[2] // width)
    warpgroups = height // ROWS

    def body(*refs: Any) -> None:
        *scalar_refs, left_ref, right_ref, result_ref = refs
        warpgroup = lax.axis_index("warpgroup")

        def pipeline(steps: _Steps, compute: Any) -> Any:
            def multiply_step(_: Any, left: Any, right: Any, total: Any) -> Any:
                own = pl.ds(warpgroup * ROWS, ROWS)
                left = left.at[:, own].transpose((1, 0)) if transposed[0] else left.at[own]
                right = right.transpose((1, 0)) if transposed[1] else right
                plgpu.wgmma(total, left, right)
                plgpu.wgmma_wait(0)
                return total

            return plgpu.emit_pipeline_warp_specialized(
                multiply_step,
                grid=(steps.times,),
                in_specs=[
                    plgpu.BlockSpec(
                        tile, position, transforms=_swizzled(x.dtype), memory_space=plgpu.SMEM
                    )
                    for tile, position, x in zip(tiles, steps[1:3], operands, strict=True)
                ],
                memory_registers=_COPY_REGISTERS,
                max_concurrent_steps=_STEPS_IN_FLIGHT,
                wg_axis="warpgroup",
                num_compute_wgs=warpgroups,
                compute_context=compute,
            )

        # All tiles use the same shared memory, which depends on no position.
        first = steps_of(*scalar_refs, *[jnp.int32(0)] * 3)
        allocations = pipeline(first, lambda run: None).get_allocations(
            left_ref, right_ref if first.expert is None else right_ref.at[0]
        )

        @functools.partial(
            pl.run_scoped,
            allocations=allocations,
            done=plgpu.SMEM(
                (warpgroups, ROWS, width), result.dtype, transforms=_swizzled(result.dtype)
            ),
            collective_axes="warpgroup",
        )
        def _(allocations: Any, done: Any) -> None:
            @plgpu.nd_loop((groups, counts[0] * counts[1]), collective_axes="core")
            def _(loop: Any) -> None:
                group, number = loop.index
                i, j = plgpu.planar_snake(number, counts, 1, _TILES_IN_ROW)
                steps = steps_of(*scalar_refs, group, i, j)

                def compute(run: Any) -> None:
                    @functools.partial(pl.run_scoped, total=plgpu.ACC((ROWS, width)))
                    def _(total: Any) -> None:
                        run(total)
                        # The tile before may still be on its way out of `done`.
                        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                        done[warpgroup] = total[...].astype(result.dtype)
                        plgpu.commit_smem()
                        own = pl.ds(i * height + warpgroup * ROWS, ROWS)
                        plgpu.copy_smem_to_gmem(
                            done.at[warpgroup],
                            result_ref.at[group, own, pl.ds(j * width, width)],
                        )

                right = right_ref if steps.expert is None else right_ref.at[steps.expert]
                pipeline(steps, compute)(left_ref, right, allocations=allocations)

            plgpu.wait_smem_to_gmem(0)

    inputs = vary_over((*scalars, *operands), varying := varying_axes(scalars, operands))
    return vary_over(
        plgpu.kernel(
            body,
            out_type=result,
            grid=(min(_CORES, groups * counts[0] * counts[1]),),
            grid_names=("core",),
            num_threads=warpgroups + 1,
            thread_name="warpgroup",
            kernel_name=name,
            compiler_params=plgpu.CompilerParams(
                lowering_semantics=plgpu.LoweringSemantics.Warpgroup
            ),
            interpret=interpret,
        )(*inputs),
        varying,
    )


def _swizzled(dtype: Any) -> tuple[Any, Any]:
    """Return the layout of a tile in shared memory that the tensor cores read."""
    inner = _SWIZZLE_BYTES // jnp.dtype(dtype).itemsize
    transforms: Any = plgpu  # JAX 0.12's types say that these are abstract
    return transforms.TilingTransform((8, inner)), transforms.SwizzleTransform(_SWIZZLE_BYTES)


def _tile(length: int) -> int:
    """Return the length of a tile of a dim that is whole steps long."""
    return _STEP if length % _LARGEST_TILE else _LARGEST_TILE


def _pad(x: jax.Array, *dims: int) -> jax.Array:
    """Fill up dims with zeros to whole steps."""
    missing = [(0, -x.shape[dim] % _STEP if dim in dims else 0) for dim in range(x.ndim)]
    return jnp.pad(x, missing) if any(end for _, end in missing) else x
