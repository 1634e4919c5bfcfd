import inspect
import os
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.cudnn import fused_attention_stablehlo as binding

from geojax.errors import UserError
from geojax.mesh import make_mesh
from geojax.models.attention import attention, chosen_implementation, cudnn, cudnn_packed
from geojax.models.attention.choice import target_platform
from geojax.models.attention.cudnn_packed import MOST_SEGMENTS, packed_attention, segment_layout


@pytest.fixture
def with_libraries(monkeypatch):
    """As if cuDNN 9.10 were installed."""
    monkeypatch.setattr(cudnn, "libraries_version", lambda: 91000)


@pytest.fixture
def without_libraries(monkeypatch):
    monkeypatch.setattr(cudnn, "libraries_version", lambda: None)


def test_an_unknown_implementation_is_refused():
    with pytest.raises(UserError, match="'flash'; there are: auto, blocked, cudnn, reference"):
        chosen_implementation(jnp.float32, 64, packed=False, implementation="flash")


def test_a_cpu_gets_blocked():
    choice = chosen_implementation(jnp.bfloat16, 64, packed=True, platform="cpu")
    assert choice == ("blocked", "attention: blocked, for platform cpu")


@pytest.mark.usefixtures("with_libraries")
@pytest.mark.parametrize("packed", [False, True])
def test_a_gpu_gets_cudnn(packed):
    assert chosen_implementation(jnp.bfloat16, 128, packed=packed, platform="cuda").name == "cudnn"


@pytest.mark.usefixtures("with_libraries")
@pytest.mark.parametrize(
    ("dtype", "head_size", "reason"),
    [(jnp.float32, 64, "inputs are float32"), (jnp.bfloat16, 60, "multiple of 8")],
)
def test_what_cudnn_cannot_compute_is_blocked_on_a_gpu(dtype, head_size, reason):
    choice = chosen_implementation(dtype, head_size, packed=False, platform="gpu")
    assert choice.name == "blocked"
    assert reason in choice.reason


@pytest.mark.usefixtures("with_libraries")
def test_packing_needs_a_recent_cudnn(monkeypatch):
    monkeypatch.setattr(cudnn, "libraries_version", lambda: 90500)
    choice = chosen_implementation(jnp.bfloat16, 64, packed=True, platform="gpu")
    assert choice.name == "blocked"
    assert "90500" in choice.reason


@pytest.mark.usefixtures("without_libraries")
def test_cudnn_by_name_without_its_libraries_is_one_line():
    x = jnp.zeros((1, 8, 2, 8), jnp.bfloat16)
    with pytest.raises(UserError, match="not installed") as error:
        attention(x, x, x, implementation="cudnn")
    assert "\n" not in str(error.value)


def test_inside_a_shard_map_the_mesh_says_the_platform():
    seen = []

    def local(x):
        seen.append(target_platform())
        return x

    spec = jax.sharding.PartitionSpec("dc")
    mapped = jax.shard_map(local, mesh=make_mesh(dc=2, data=4), in_specs=spec, out_specs=spec)
    jax.eval_shape(mapped, jnp.zeros(2))
    assert seen == ["cpu"]


def test_segment_layout_finds_the_runs():
    segment_ids = jnp.asarray([[1, 1, 2, 2, 2, 0], [1, 1, 1, 1, 1, 1], [1, 2, 3, 4, 0, 0]])
    starts, lengths = segment_layout(segment_ids, 5)
    assert starts.tolist() == [[0, 2, 5, -1, -1, -1], [0, -1, -1, -1, -1, -1], [0, 1, 2, 3, 4, -1]]
    assert lengths.tolist() == [[2, 3, 1, -1, -1], [6, -1, -1, -1, -1], [1, 1, 1, 1, 2]]
    assert starts.dtype == lengths.dtype == jnp.int32


def test_segment_layout_with_every_place_taken():
    starts, lengths = segment_layout(jnp.asarray([[1, 1, 2]]), 2)
    assert starts.tolist() == [[0, 2, -1]]
    assert lengths.tolist() == [[2, 1]]


def test_the_private_binding_is_what_we_bind():
    forward = inspect.signature(binding._dot_product_attention_fwd_impl).parameters
    backward = inspect.signature(binding._dot_product_attention_bwd_impl).parameters
    operands = (
        "query key value bias q_seqlen kv_seqlen q_offsets kv_offsets page_table_k page_table_v"
    )
    named = set(cudnn_packed._parameters(1.0))
    assert list(forward)[:10] == operands.split()
    assert set(list(forward)[10:]) == named | {"is_training"}
    assert list(backward)[:13] == [*operands.split(), "activation", "fwd_output", "grad_output"]
    assert set(list(backward)[13:]) == named


def test_packed_types_agree_forward_and_backward():
    """Both branches of the packed path, traced: on CPUs the types are all that can be checked."""
    length = 3 * MOST_SEGMENTS
    query = jax.ShapeDtypeStruct((2, length, 4, 8), jnp.bfloat16)
    key = jax.ShapeDtypeStruct((2, length, 2, 8), jnp.bfloat16)
    segment_ids = jax.ShapeDtypeStruct((2, length), jnp.int32)

    def gradients(query, key, value, segment_ids):
        def attend(query, key, value):
            return packed_attention(query, key, value, segment_ids, 0.5)

        output, backward = jax.vjp(attend, query, key, value)
        return (output, *backward(output))

    shapes = jax.eval_shape(gradients, query, key, key, segment_ids)
    assert [(x.shape, x.dtype) for x in shapes] == [
        (x.shape, x.dtype) for x in (query, query, key, key)
    ]
    program = str(jax.make_jaxpr(gradients)(query, key, key, segment_ids))
    assert f"[2,4,{length},{length}]" not in program


@pytest.mark.skipif(shutil.which("nvidia-smi") is None, reason="needs an NVIDIA GPU")
def test_cudnn_equals_the_reference_on_a_gpu():
    """In a process of its own: this one simulates CPU devices."""
    environment = os.environ | {"JAX_PLATFORMS": "cuda"}
    subprocess.run([sys.executable, __file__], env=environment, check=True, timeout=300)


def compare_on_a_gpu(documents, key_heads):
    generator = np.random.default_rng(0)
    shapes = [(2, 512, n, 64) for n in (4, key_heads, key_heads, 4)]
    arrays = [jnp.asarray(generator.standard_normal(s), jnp.bfloat16) for s in shapes]
    numbers = np.sort(generator.integers(1, 6, (2, 512)), axis=1)
    segment_ids = jnp.asarray(numbers, jnp.int32) if documents else None

    def results(implementation, dtype):
        query, key, value, cotangent = (x.astype(dtype) for x in arrays)
        output, backward = jax.vjp(
            lambda *x: attention(*x, segment_ids, implementation=implementation), query, key, value
        )
        return (output, *backward(cotangent))

    with jax.default_matmul_precision("highest"):
        expected = results("reference", jnp.float32)
    for one, other in zip(results("cudnn", jnp.bfloat16), expected, strict=True):
        np.testing.assert_allclose(one.astype(np.float32), other, rtol=2**-6, atol=2**-5)


if __name__ == "__main__":
    for documents in (False, True):
        for key_heads in (4, 2):
            compare_on_a_gpu(documents, key_heads)
