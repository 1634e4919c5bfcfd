"""Weights of a model of your own in files: what is written is read, and what is wrong is named."""

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from support.own_models import own_model

from geojax.errors import UserError
from geojax.models import parameter_shapes
from geojax.models.huggingface.weight_files import SINGLE
from geojax.models.own.weights import OwnWeights
from geojax.named_arrays import leaves_by_name
from geojax.saved_runs import own_export

MODEL = own_model("pattern")
NAMES = {name: leaf.shape for name, leaf in leaves_by_name(parameter_shapes(MODEL)).items()}


class Drawn:
    """Weights as a saved run gives them, in blocks."""

    def __init__(self):
        random = np.random.default_rng(1)
        self.leaves = {name: random.standard_normal(shape) for name, shape in NAMES.items()}

    def blocks(self, leaf):
        values = self.leaves[leaf]
        half = values.shape[0] // 2
        for rows in (np.arange(half), np.arange(half, values.shape[0])):
            if rows.size:
                others = [np.arange(size) for size in values.shape[1:]]
                yield (rows, *others), values[rows]


@pytest.mark.parametrize("file_bytes", [1, own_export.FILE_BYTES])
def test_what_is_exported_is_read_part_by_part(tmp_path, monkeypatch, file_bytes):
    monkeypatch.setattr(own_export, "FILE_BYTES", file_bytes)
    drawn = Drawn()
    own_export.write_own_model(tmp_path, MODEL, drawn, "float64", lambda line: None)
    assert (tmp_path / SINGLE).exists() == (file_bytes > 1)
    weights = OwnWeights(tmp_path, MODEL)
    weights.check()
    for name, values in drawn.leaves.items():
        stacked = weights.stacked_dims[name]
        assert stacked == name.startswith("layers.")
        whole = tuple(slice(0, size) for size in values.shape[stacked:])
        for stack in np.ndindex(values.shape[:stacked]):
            np.testing.assert_array_equal(weights.read(name, stack, whole), values[stack])


def test_files_name_blocks_and_others_are_refused(tmp_path):
    own_export.write_own_model(tmp_path, MODEL, Drawn(), "float32", lambda line: None)
    tensors = load_file(tmp_path / SINGLE)
    # The second layer's second block is the fourth of all.
    assert tensors["blocks.3.up.kernel"].shape == (12, 24)
    bias = tensors.pop("head.bias")

    def other(name, **changed):
        folder = tmp_path / name
        folder.mkdir()
        save_file(tensors | changed, folder / SINGLE)
        return OwnWeights(folder, MODEL)

    digest = OwnWeights(tmp_path, MODEL).digest()
    assert other("same", **{"head.bias": bias}).digest() == digest
    assert other("changed", **{"head.bias": bias + 1}).digest() != digest
    with pytest.raises(UserError, match=r"lacks head\.bias, which the model has"):
        other("lacking")
    with pytest.raises(UserError, match=r"head\.bias has shape \[3\], and the model's is \[29\]"):
        other("short", **{"head.bias": np.zeros(3)}).check()
