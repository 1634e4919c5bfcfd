"""Experts' matrices in MXFP4 are read as the format defines them, whatever is asked for."""

import itertools
import json
import shutil

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from geojax.errors import UserError
from geojax.models import ModelConfig, init_parameters
from geojax.models.huggingface.checkpoint import HuggingFaceWeights, read_model_fields
from geojax.models.huggingface.mxfp4 import decode
from geojax.models.huggingface.write import CheckpointWriter
from geojax.named_arrays import leaves_by_name

MODEL = ModelConfig.load("gpt-oss-20b").replace(
    num_hidden_layers=2,
    hidden_size=96,
    num_attention_heads=2,
    num_key_value_heads=1,
    intermediate_size=64,
    vocab_size=11,
    num_experts=3,
    num_experts_per_tok=2,
)
GATE_UP, DOWN = (f"model.layers.1.mlp.experts.{name}_proj" for name in ("gate_up", "down"))


def by_definition(pairs, scales):
    """One number of 4 bits after the other: sign, two bits of exponent, one of mantissa."""
    numbers = np.zeros((*scales.shape, 32))
    for *block, byte in np.ndindex(pairs.shape):
        pair = int(pairs[*block, byte])
        for half, code in enumerate((pair % 16, pair // 16)):
            sign, exponent, mantissa = code // 8, code // 2 % 4, code % 2
            size = (1 + mantissa / 2) * 2.0 ** (exponent - 1) if exponent else mantissa / 2
            factor = 2.0 ** (int(scales[tuple(block)]) - 127)
            numbers[*block, 2 * byte + half] = (-1) ** sign * size * factor
    return numbers.reshape(*scales.shape[:-1], -1)


@pytest.fixture
def folder(tmp_path):
    """A checkpoint with random blocks in place of the experts' matrices."""
    leaves = leaves_by_name(init_parameters(MODEL, jax.random.key(0)))
    with CheckpointWriter(tmp_path, MODEL, dtype="bfloat16", token_ids={}) as writer:
        for name in writer.leaves:
            writer.put(name, tuple(map(np.arange, leaves[name].shape)), np.asarray(leaves[name]))
    path, random = tmp_path / "model.safetensors", np.random.default_rng(4)
    tensors = load_file(path)
    for name in [name for name in tensors if name.endswith("_proj")]:
        experts, inputs, outputs = tensors.pop(name).shape
        shape = (experts, outputs, inputs // 32)
        tensors[f"{name}_blocks"] = random.integers(0, 256, (*shape, 16), np.uint8)
        tensors[f"{name}_scales"] = random.integers(1, 180, shape, np.uint8)
    save_file(tensors, path)
    change_config(tmp_path, {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})
    return tmp_path


def change_config(folder, quantization):
    path = folder / "config.json"
    content = json.loads(path.read_text()) | {"quantization_config": quantization}
    path.write_text(json.dumps(content))


def test_blocks_are_read_as_the_format_defines_them(folder):
    assert ModelConfig(**read_model_fields(folder)) == MODEL
    tensors = load_file(folder / "model.safetensors")
    weights = HuggingFaceWeights(folder, MODEL)
    weights.check()
    gate_up, down = (
        by_definition(tensors[f"{name}_blocks"], tensors[f"{name}_scales"]).swapaxes(1, 2)
        for name in (GATE_UP, DOWN)
    )
    matrices = {"gate": gate_up[..., ::2], "up": gate_up[..., 1::2], "down": down}
    for (name, matrix), expert in itertools.product(matrices.items(), range(3)):
        rows, columns = matrix.shape[1:]
        for parts in [(slice(0, rows), slice(0, columns)), (slice(31, 33), slice(7, columns))]:
            read = weights.read(f"layers.experts.{name}.kernel", (1, expert), parts)
            assert read.dtype == np.float32
            np.testing.assert_array_equal(read, matrix[expert][parts])


def test_weights_in_blocks_have_a_digest_that_tells_them_from_others(folder, tmp_path_factory):
    other = tmp_path_factory.mktemp("other")
    shutil.copytree(folder, other, dirs_exist_ok=True)
    digests = [HuggingFaceWeights(each, MODEL).digest() for each in (folder, other)]
    assert digests[0] == digests[1]
    third = tmp_path_factory.mktemp("third")
    shutil.copytree(folder, third, dirs_exist_ok=True)
    tensors = load_file(third / "model.safetensors")
    tensors[f"{DOWN}_blocks"][0, 0, 0, 0] ^= 1
    save_file(tensors, third / "model.safetensors")
    assert HuggingFaceWeights(third, MODEL).digest() != digests[0]


def test_a_scale_of_255_is_no_weight(folder):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    tensors[f"{DOWN}_scales"][0, 5, 1] = 255
    save_file(tensors, path)
    whole = (slice(0, 64), slice(0, 96))
    decoded = decode(tensors[f"{DOWN}_blocks"][0], tensors[f"{DOWN}_scales"][0])
    assert np.argwhere(np.isnan(decoded)).tolist() == [[5, row] for row in range(32, 64)]
    with pytest.raises(UserError, match=f"{path}: {DOWN}_scales holds numbers that are no weights"):
        HuggingFaceWeights(folder, MODEL).read("layers.experts.down.kernel", (1, 0), whole)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda scales: scales[:, :, :1].copy(), r"has shape \[3, 96, 1\], .* is \[3, 96, 2\]"),
        (lambda scales: scales.astype(np.float32), "has dtype F32; U8 would do"),
    ],
)
def test_other_scales_are_refused(folder, change, message):
    path, name = folder / "model.safetensors", f"{DOWN}_scales"
    tensors = load_file(path)
    save_file(tensors | {name: change(tensors[name])}, path)
    with pytest.raises(UserError, match=f"{name} {message}$"):
        HuggingFaceWeights(folder, MODEL).check()


def test_other_ways_to_quantize_are_refused(folder):
    change_config(folder, {"quant_method": "gptq"})
    for open_folder in (read_model_fields, lambda path: HuggingFaceWeights(path, MODEL)):
        with pytest.raises(UserError, match=r"quantized weights .*, but for mxfp4, are not carr"):
            open_folder(folder)
