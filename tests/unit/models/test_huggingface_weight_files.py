"""Files that say less or more than their config, and numbers that are no weights."""

import os

import jax
import ml_dtypes
import numpy as np
import pytest
from model_families import FAMILIES
from safetensors.numpy import load_file, save_file
from support.plans import step_plan_on

from geojax import make_mesh
from geojax.checkpoint.reading.initial_weights import read_weights
from geojax.errors import UserError
from geojax.models import init_parameters
from geojax.models.huggingface.checkpoint import HuggingFaceWeights
from geojax.models.huggingface.weight_files import are_weights
from geojax.models.huggingface.write import CheckpointWriter
from geojax.named_arrays import leaves_by_name
from geojax.precision import policy
from geojax.step.state import parameter_layouts

TIED = FAMILIES["llama"].replace(tie_word_embeddings=True)
UNTIED = TIED.replace(tie_word_embeddings=False)
TABLE, HEAD = "model.embed_tokens.weight", "lm_head.weight"
KERNEL = "model.layers.1.self_attn.k_proj.weight"


def write(folder, model, dtype="bfloat16"):
    leaves = leaves_by_name(jax.jit(lambda key: init_parameters(model, key))(jax.random.key(0)))
    with CheckpointWriter(folder, model, dtype=dtype, token_ids={}) as writer:
        for name in writer.leaves:
            writer.put(name, tuple(map(np.arange, leaves[name].shape)), np.asarray(leaves[name]))
    return folder / "model.safetensors"


@pytest.fixture
def path(tmp_path):
    return write(tmp_path, TIED)


def change(path, name, edit):
    tensors = load_file(path)
    tensors[name] = edit(tensors)
    save_file(tensors, path)


def other_head(tensors):
    head = tensors[TABLE].copy()
    head[-1, -1] += 1
    return head


def test_a_head_that_is_its_tied_table_is_left(path):
    change(path, HEAD, lambda tensors: tensors[TABLE])
    HuggingFaceWeights(path.parent, TIED).check()


def test_a_head_that_differs_from_its_tied_table_is_refused_or_read_untied(path):
    change(path, HEAD, other_head)
    message = f"^{path}: {HEAD} differs from {TABLE}, and tie_word_embeddings is true; set "
    with pytest.raises(UserError, match=message):
        HuggingFaceWeights(path.parent, TIED).check()
    untied = HuggingFaceWeights(path.parent, UNTIED)
    untied.check()
    columns = (slice(0, UNTIED.hidden_size), slice(UNTIED.vocab_size - 1, UNTIED.vocab_size))
    expected = load_file(path)[HEAD][-1:].T
    np.testing.assert_array_equal(untied.read("head.kernel", (), columns), expected)


def test_a_head_of_another_size_than_a_tied_table_is_refused(path):
    change(path, HEAD, lambda tensors: tensors[TABLE][:-1].copy())
    with pytest.raises(UserError, match=f"{HEAD} differs from {TABLE}"):
        HuggingFaceWeights(path.parent, TIED).check()


def test_gpt2_is_read_by_the_names_that_it_is_published_with(tmp_path, tmp_path_factory):
    model = FAMILIES["gpt3"]
    path = write(tmp_path, model, "float32")
    whole = HuggingFaceWeights(tmp_path, model)
    name, part = "layers.attention.key.kernel", (slice(3, 7), slice(2, 9))
    expected = whole.read(name, (1,), part)
    tensors = load_file(path)
    assert all(each.startswith("transformer.") for each in tensors)
    masks = {f"h.{layer}.attn.bias": np.ones((1, 1, 4, 4), np.float32) for layer in range(2)}
    published = {each.removeprefix("transformer."): array for each, array in tensors.items()}
    folder = tmp_path_factory.mktemp("published")
    (folder / "config.json").write_bytes((tmp_path / "config.json").read_bytes())
    save_file(published | masks, folder / path.name)
    weights = HuggingFaceWeights(folder, model)
    weights.check()
    np.testing.assert_array_equal(weights.read(name, (1,), part), expected)
    assert weights.digest() == whole.digest()


def test_a_tensor_of_another_shape_has_no_digest(path):
    change(path, KERNEL, lambda tensors: tensors[KERNEL][:0])
    with pytest.raises(UserError, match=r"k_proj.weight has shape \[0, .* and the model's is"):
        HuggingFaceWeights(path.parent, TIED).digest()


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf, 1e38, -1e38])
def test_numbers_that_are_no_weights_are_refused_with_the_tensors_name(path, wrong):
    def edit(tensors):
        kernel = tensors[KERNEL].copy()
        kernel[3, 5] = wrong
        return kernel

    change(path, KERNEL, edit)
    plan = step_plan_on(make_mesh(devices=jax.devices()[:1]), policy("fp32"), zero_stage=0)
    weights = HuggingFaceWeights(path.parent, TIED)
    with pytest.raises(UserError, match=f"^{path}: {KERNEL} holds numbers that are no weights"):
        read_weights(weights, parameter_layouts(TIED, plan), plan.mesh)


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16, np.float32, np.float64])
def test_any_float_is_checked_by_its_bits(dtype):
    good = np.array([[0.0, -0.0, 1.5], [-65504, 65504, -1e-30]]).astype(dtype)
    assert are_weights(good)
    assert are_weights(good[:, ::2])
    assert are_weights(-np.abs(good))
    assert are_weights(good[:0])
    for wrong in (np.nan, -np.nan, np.inf, -np.inf):
        for place in np.ndindex(good.shape):
            bad = good.copy()
            bad[place] = wrong
            assert not are_weights(bad)


def test_a_pipe_in_place_of_a_file_is_not_waited_for(path):
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(UserError, match=f"^{path}: is no regular file; a safetensors file would"):
        HuggingFaceWeights(path.parent, TIED)
