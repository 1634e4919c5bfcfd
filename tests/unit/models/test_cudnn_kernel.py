import inspect
import os
import shutil
import subprocess
import sys

import emulated_cudnn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.cudnn import fused_attention_stablehlo as binding
from spread_rows import (
    arrays,
    assert_equal,
    documents,
    in_rank_order,
    in_row_order,
    output_and_gradients,
    spread,
)

from geojax.models.attention.blocked import TILED
from geojax.models.attention.blocks import ScoreBlock
from geojax.models.attention.cudnn import packed as packed_rows
from geojax.models.attention.cudnn import primitives as cudnn_primitives
from geojax.models.attention.cudnn import support as cudnn
from geojax.models.attention.cudnn.kernel import CUDNN
from geojax.models.attention.cudnn.packed import CAPACITIES, segment_layout
from geojax.models.attention.operands import ScoreRule
from geojax.models.parallel.parallelism import Parallelism


@pytest.fixture
def emulated(monkeypatch):
    """cuDNN in plain JAX, for any dtype."""
    emulated_cudnn.install(monkeypatch)
    monkeypatch.setattr(cudnn, "unsupported_reason", lambda *_, **__: None)
    with jax.enable_x64(True):
        yield


def test_segment_layout_finds_the_runs():
    segment_ids = jnp.asarray([[1, 1, 2, 2, 2, 0], [1, 1, 1, 1, 1, 1], [1, 2, 3, 4, 0, 0]])
    starts, lengths = segment_layout(segment_ids, 5)
    assert starts.tolist() == [[0, 2, 5, -1, -1], [0, -1, -1, -1, -1], [0, 1, 2, 3, 4]]
    assert lengths.tolist() == [[2, 3, 1, -1, -1], [6, -1, -1, -1, -1], [1, 1, 1, 1, 2]]
    assert starts.dtype == lengths.dtype == jnp.int32


def test_segment_layout_with_every_place_taken():
    starts, lengths = segment_layout(jnp.asarray([[1, 1, 2]]), 2)
    assert starts.tolist() == [[0, 2]]
    assert lengths.tolist() == [[2, 1]]


def test_the_private_binding_is_what_we_bind():
    forward = inspect.signature(binding._dot_product_attention_fwd_impl).parameters
    backward = inspect.signature(binding._dot_product_attention_bwd_impl).parameters
    operands = (
        "query key value bias q_seqlen kv_seqlen q_offsets kv_offsets page_table_k page_table_v"
    )
    named = set(cudnn_primitives.parameters(cudnn_primitives.CAUSAL, ScoreRule(1.0)))
    # From JAX 0.12 on the arguments of a function of the scores, which we do not have, follow.
    named |= {"score_mod_args"} & set(forward)
    assert list(forward)[:10] == operands.split()
    assert set(list(forward)[10:]) == named | {"is_training"}
    assert list(backward)[:13] == [*operands.split(), "activation", "fwd_output", "grad_output"]
    assert set(list(backward)[13:]) == named


@pytest.mark.parametrize("packed", [False, True])
def test_types_agree_forward_and_backward(monkeypatch, packed):
    """With JAX's own primitives, traced: on CPUs the types are all that can be checked."""
    monkeypatch.setattr(cudnn, "libraries_version", lambda: 91000)
    length = 3 * CAPACITIES[-1]
    query = jax.ShapeDtypeStruct((2, length, 4, 8), jnp.bfloat16)
    key = jax.ShapeDtypeStruct((2, length, 2, 8), jnp.bfloat16)
    segment_ids = jax.ShapeDtypeStruct((2, length), jnp.int32) if packed else None

    def gradients(query, key, value, segment_ids):
        return output_and_gradients(
            query, key, value, query, segment_ids, implementation="cudnn", scale=0.5
        )

    shapes = jax.eval_shape(gradients, query, key, key, segment_ids)
    assert [(x.shape, x.dtype) for x in shapes] == [
        (x.shape, x.dtype) for x in (query, query, key, key)
    ]
    program = str(jax.make_jaxpr(gradients)(query, key, key, segment_ids))
    assert f"[2,4,{length},{length}]" not in program


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("packed", [False, True])
def test_whole_rows(packed):
    operands = [*arrays(3, 40, heads=4, key_heads=2), documents(3, 40) if packed else None]
    expected = output_and_gradients(*operands, implementation="reference")
    assert_equal(output_and_gradients(*operands, implementation="cudnn"), expected, 1e-12)


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("windowed", [None, True, False])
@pytest.mark.parametrize("packed", [False, True])
def test_windows_and_sinks(packed, windowed):
    operands = [*arrays(3, 40, heads=4, key_heads=2), documents(3, 40) if packed else None]
    options = {
        "window": 7,
        "is_windowed": None if windowed is None else jnp.asarray(windowed),
        "sinks": jnp.linspace(-1.0, 1.0, 4),
    }
    expected = output_and_gradients(*operands, implementation="reference", **options)
    actual = output_and_gradients(*operands, implementation="cudnn", **options)
    assert_equal(actual, expected, 1e-12)


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize(
    ("most", "most_bytes", "key_heads"),
    [
        (1, 2**30, 2),
        (2, 2**30, 2),
        (CAPACITIES[0], 2**16, 2),
        (CAPACITIES[1], 1, 2),
        (CAPACITIES[1] + 1, 2**30, 2),
        (2, 1, 1),
    ],
)
def test_rows_of_one_few_and_many_documents(monkeypatch, most, most_bytes, key_heads):
    monkeypatch.setattr(packed_rows, "MOST_WORKSPACE_BYTES", most_bytes)
    length = CAPACITIES[1] + 1
    many = jnp.minimum(jnp.arange(length), most - 1)
    segment_ids = jnp.stack([jnp.zeros_like(many), many]).astype(jnp.int32)
    operands = [*arrays(2, length, heads=4, key_heads=key_heads), segment_ids]
    expected = output_and_gradients(*operands, implementation="reference")
    assert_equal(output_and_gradients(*operands, implementation="cudnn"), expected, 1e-12)


# [rows, length, heads, key heads, dims, dims of a value] and segments of a row: the bytes that the
# backward of cuDNN 9 asked for when XLA compiled it on an H200.
WORKSPACES = {
    ((4, 4096, 16, 8, 128, 128), 32): 8_623_522_560,
    ((1, 4096, 16, 16, 128, 128), 32): 1_082_143_744,
    ((1, 4096, 16, 1, 128, 128), 32): 2_155_881_216,
    ((1, 4096, 16, 8, 64, 64), 32): 1_082_139_392,
    ((1, 4096, 16, 16, 192, 128), 32): 1_619_014_656,
    ((1, 4096, 16, 8, 256, 256), 8): 1_075_841_792,
    ((1, 8192, 16, 8, 128, 128), 8): 1_077_938_944,
    ((1, 4096, 16, 8, 96, 96), 8): 404_753_152,
    ((2, 4096, 12, 1, 192, 192), 8): 1_211_110_144,
    ((4, 4096, 16, 8, 128, 128), 1): 269_484_288,
    ((4, 4096, 16, 16, 192, 128), 1): 202_375_424,
    ((4, 4096, 12, 1, 192, 192), 1): 302_776_576,
}


@pytest.mark.parametrize(("shape", "capacity"), WORKSPACES)
def test_workspace_is_what_cudnn_asks_for(shape, capacity):
    rows, length, heads, key_heads, dims, value_dims = shape
    shapes = (rows, length, heads, dims), (rows, length, key_heads, value_dims)
    needed = cudnn_primitives.backward_workspace_bytes(*shapes, capacity)
    assert needed == pytest.approx(WORKSPACES[shape, capacity], rel=2e-5)


def test_groups_are_the_fewest_whose_workspaces_fit():
    most = packed_rows.MOST_WORKSPACE_BYTES

    def groups(times, rows, heads, key_heads):
        return packed_rows._groups(times * most, (rows, 64, heads, 8), key_heads)

    assert groups(1, 4, 16, 8) == (1, 1)
    assert groups(3, 4, 16, 8) == (4, 1)
    assert groups(8, 1, 16, 8) == (1, 8)
    assert groups(8, 3, 16, 8) == (3, 4)
    assert groups(2, 1, 12, 1) == (1, 2)
    assert groups(9, 1, 12, 4) == (1, 12)
    assert groups(40, 1, 2, 1) == (1, 2)


def test_the_workspace_of_any_number_of_segments_is_that_of_a_group():
    of_one = cudnn_primitives.backward_workspace_bytes((4, 4096, 32, 128), (4, 4096, 8, 128), 1)
    most = packed_rows.workspace_bytes((4, 4096, 32, 128), (4, 4096, 8, 128))
    assert of_one < most < packed_rows.MOST_WORKSPACE_BYTES


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize(
    ("method", "options"), [("ring", {}), ("all_gather", {}), ("all_gather", {"window": 11})]
)
@pytest.mark.parametrize("packed", [False, True])
def test_rows_that_ranks_share(method, options, packed):
    operands = [*arrays(2, 64, heads=4, key_heads=2), documents(2, 64) if packed else None]
    expected = output_and_gradients(*operands, implementation="blocked", **options)
    parallelism = Parallelism(context=4, context_method=method)
    _, program = spread(parallelism, packed=packed, implementation="cudnn", **options)
    actual = in_row_order(parallelism, program(*in_rank_order(parallelism, operands)))
    assert_equal(actual, expected, 1e-10)


# The kernel itself runs on GPUs alone; the tests above emulate it.
@pytest.mark.skipif(shutil.which("nvidia-smi") is None, reason="needs an NVIDIA GPU")
def test_cudnn_equals_the_reference_on_a_gpu():
    """In a process of its own: this one simulates CPU devices."""
    environment = os.environ | {"JAX_PLATFORMS": "cuda"}
    subprocess.run([sys.executable, __file__], env=environment, check=True, timeout=300)


def compare_on_a_gpu(packed, key_heads):
    operands = arrays(2, 512, heads=4, key_heads=key_heads, size=64, dtype=jnp.bfloat16)
    segment_ids = documents(2, 512) if packed else None

    def results(implementation, dtype):
        wide = [x.astype(dtype) for x in operands]
        return output_and_gradients(*wide, segment_ids, implementation=implementation)

    with jax.default_matmul_precision("highest"):
        expected = results("reference", jnp.float32)
    for one, other in zip(results("cudnn", jnp.bfloat16), expected, strict=True):
        np.testing.assert_allclose(one.astype(np.float32), other, rtol=2**-6, atol=2**-5)


def compare_blocks_on_a_gpu(packed, key_count):
    """Keys that lie before the queries, some of a document that goes on, maybe none that count."""
    query, _, _, cotangent = arrays(2, 256, heads=4, key_heads=2, size=64, dtype=jnp.bfloat16)
    _, key, value, _ = arrays(2, 512, heads=4, key_heads=2, size=64, dtype=jnp.bfloat16)
    segments = documents(2, 768) if packed else None
    rule = ScoreRule(0.125)
    pieces = (None, None) if segments is None else (segments[:, 512:], segments[:, :512])
    block = ScoreBlock(query, key, value, *pieces, causal=False, key_count=key_count)
    wide = block._replace(**{n: getattr(block, n).astype(jnp.float32) for n in block._fields[:3]})
    with jax.default_matmul_precision("highest"):
        expected = TILED.forward(wide, rule)
        # As if the queries had seen as much again, elsewhere: their log-sum-exp is larger by log 2.
        finite = expected.log_sum_exp > -1e20
        total = jnp.where(finite, expected.log_sum_exp, 0) + jnp.log(2)
        output = jnp.where(finite, expected.output, 0)
        saved = output, total, cotangent.astype(jnp.float32)
        wanted = TILED.backward(wide, rule, *saved)
    actual = CUDNN.forward(block, rule)
    np.testing.assert_array_equal(actual.log_sum_exp > -1e20, finite)
    np.testing.assert_allclose(
        jnp.where(finite, actual.log_sum_exp, 0),
        jnp.where(finite, expected.log_sum_exp, 0),
        atol=2**-8,
    )
    np.testing.assert_allclose(jnp.where(finite, actual.output, 0), output, rtol=2**-6, atol=2**-5)
    narrow = output.astype(jnp.bfloat16), total, cotangent
    for one, other in zip(CUDNN.backward(block, rule, *narrow), wanted, strict=True):
        np.testing.assert_allclose(one, other, rtol=2**-6, atol=2**-5)


if __name__ == "__main__":
    for packed in (False, True):
        for key_heads in (4, 2):
            compare_on_a_gpu(packed, key_heads)
        for key_count in (None, 300, 0):
            count = None if key_count is None else jnp.int32(key_count)
            compare_blocks_on_a_gpu(packed, count)
