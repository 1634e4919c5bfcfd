"""Weights of a Hugging Face checkpoint on any layout, and of a saved run without one."""

import math
import shutil
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support import whole_state
from support.plans import step_plan_on
from support.staged_states import LAYOUTS, MODEL, SITES, assert_same_bits, numbered

from geojax import make_mesh
from geojax.checkpoint import Checkpointer
from geojax.checkpoint.reading.initial_weights import read_weights
from geojax.checkpoint.reading.saved_model import SavedModel
from geojax.errors import UserError
from geojax.inference.loaded_model import weight_layouts
from geojax.islands.programs.site_part import SitePart
from geojax.islands.site_state import saved_layouts
from geojax.models import ModelConfig, init_parameters, parameter_count
from geojax.models.huggingface.checkpoint import HuggingFaceWeights
from geojax.models.huggingface.write import CheckpointWriter
from geojax.named_arrays import leaves_by_name
from geojax.precision import policy
from geojax.step.state import parameter_layouts


def write(folder, model, parameters, dtype, **options):
    leaves = leaves_by_name(parameters)
    with CheckpointWriter(folder, model, dtype=dtype, token_ids={}, **options) as writer:
        for name in writer.leaves:
            values = np.asarray(leaves[name])
            writer.put(name, tuple(map(np.arange, values.shape)), values)


@pytest.mark.parametrize("name", LAYOUTS)
def test_weights_are_read_onto_any_layout(tmp_path, name):
    mesh, layouts, state, whole = numbered(name)
    write(tmp_path, MODEL, whole.parameters, "float32", file_bytes=20_000)
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    weights = HuggingFaceWeights(tmp_path, MODEL)
    read = read_weights(weights, layouts.parameters, mesh)
    expected = whole_state.trim(state.parameters, layouts.parameters, mesh)
    trimmed = whole_state.trim(read, layouts.parameters, mesh)
    jax.tree.map(assert_same_bits, trimmed, expected)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, (read, state.parameters))
    assert shardings[0] == shardings[1]


def counting(weights, monkeypatch):
    """The numbers of elements that `weights` will have read, one entry for each read."""
    sizes = []

    def counted(*place):
        values = HuggingFaceWeights.read(weights, *place)
        sizes.append(values.size)
        return values

    monkeypatch.setattr(weights, "read", counted)
    return sizes


def test_an_island_reads_its_own_layers_and_no_more(tmp_path, monkeypatch):
    """The second of two sites in a V, which has the middle layers, or the last and a tied table."""
    whole = numbered("no pipeline")[3].parameters
    write(tmp_path, MODEL, whole, "float32")
    plan = step_plan_on(make_mesh(devices=jax.devices()[:4], data=2, tensor=2), policy("fp32"))
    for chunks in ({1: range(1, 3), 2: range(3, 4)}, {3: range(3, 5)}):
        part = SitePart(MODEL, chunks)
        layouts = saved_layouts([part], optax.identity(), plan).parameters
        weights = HuggingFaceWeights(tmp_path, MODEL)
        sizes = counting(weights, monkeypatch)
        read = read_weights(weights, layouts, plan.mesh)
        expected = part.held(whole)
        assert sum(sizes) == sum(leaf.size for leaf in jax.tree.leaves(expected))
        unpadded = jax.tree.map(
            lambda leaf, own: np.asarray(leaf)[tuple(map(slice, own.shape))], read, expected
        )
        jax.tree.map(assert_same_bits, unpadded, expected)


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_saved_run_is_read_onto_a_mesh_or_without_devices(tmp_path, name):
    mesh, layouts, state, whole = numbered(name)
    checkpoints = tmp_path / "checkpoints"
    with Checkpointer(checkpoints, mesh, sites=SITES) as checkpointer:
        checkpointer.save(7, state, layouts, {"note": "kept"})
    saved = SavedModel.open(tmp_path)
    saved.verify()
    assert (saved.step, saved.metadata["note"]) == (7, "kept")
    for leaf, expected in leaves_by_name(whole.parameters).items():
        assert_same_bits(saved.whole(leaf, expected.shape), expected)
    target = make_mesh(devices=jax.devices()[:2], tensor=2)
    layouts = weight_layouts(MODEL, target, jnp.float32)
    read = whole_state.trim(saved.read(layouts, target), layouts, target)
    jax.tree.map(assert_same_bits, read, whole.parameters)

    shutil.rmtree(checkpoints / "west")
    if LAYOUTS[name][1].get("dc_role") != "stage":  # each site holds the whole model
        assert [part.path for part in SavedModel.open(tmp_path).parts] == ["east/7"]
        return
    with pytest.raises(UserError, match=r"step 7 lacks the part of site west; copy .* east/7$"):
        SavedModel.open(tmp_path)


def test_the_newest_step_that_is_whole_is_chosen(tmp_path):
    """Beside a run, one site may have saved a step that the other is still writing."""
    mesh, layouts, state, _ = numbered("sites as stages")
    checkpoints = tmp_path / "checkpoints"
    with Checkpointer(checkpoints, mesh, sites=SITES) as checkpointer:
        for step in (7, 9):
            checkpointer.save(step, state, layouts, {})
    shutil.rmtree(checkpoints / "west" / "9")
    lines = []
    saved = SavedModel.open(tmp_path, log=lines.append)
    assert (saved.step, saved.is_removed) == (7, False)
    (line,) = lines
    assert "step 9 lacks the part of site west" in line
    assert line.endswith("; reading step 7")
    shutil.rmtree(checkpoints / "west" / "7")
    assert saved.is_removed
    with pytest.raises(UserError, match="step 9 lacks the part of site west"):
        SavedModel.open(tmp_path)


def test_a_run_without_the_step_is_refused(tmp_path):
    with pytest.raises(UserError, match=f"^{tmp_path}: holds no checkpoint of step 3$"):
        SavedModel.open(tmp_path, 3)


def test_reading_holds_little_more_than_the_shards(tmp_path, monkeypatch):
    """Beside the shards of this process's devices at most two files' slices."""
    model = ModelConfig(
        num_hidden_layers=4,
        hidden_size=256,
        num_attention_heads=4,
        intermediate_size=768,
        vocab_size=1024,
        max_position_embeddings=64,
    )
    with jax.default_device(jax.devices()[0]):
        write(
            tmp_path, model, init_parameters(model, jax.random.key(0)), "bfloat16", file_bytes=10**6
        )
    plan = step_plan_on(make_mesh(data=8), policy("fp32"))
    layouts = parameter_layouts(model, plan)
    shards = 8 * sum(4 * math.prod(leaf.shard_shape) for leaf in jax.tree.leaves(layouts))
    weights = HuggingFaceWeights(tmp_path, model)
    sizes = counting(weights, monkeypatch)
    tracemalloc.start()
    jax.block_until_ready(read_weights(weights, layouts, plan.mesh))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert sum(sizes) == parameter_count(model), "each element is read once"
    assert peak <= shards + 2 * 10**6, f"{peak:,} bytes beside {shards:,} of shards"
