"""Export of a model of your own: safetensors by the attributes of its `Decoder`."""

import json
from collections.abc import Callable
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file

from geojax.checkpoint.reading.merged_model import MergedModel
from geojax.checkpoint.reading.saved_model import SavedModel
from geojax.models import OwnModel, parameter_shapes
from geojax.models.huggingface.weight_files import INDEX, SINGLE
from geojax.models.own.weights import tensor_name
from geojax.named_arrays import leaves_by_name

FILE_BYTES = 5 * 10**9
"""Bytes after which a file ends."""


def write_own_model(
    folder: Path,
    model: OwnModel,
    weights: SavedModel | MergedModel,
    dtype: str,
    log: Callable[[str], None],
) -> None:
    """Write weights into an empty folder; each tensor has a block's own name.

    Args:
        folder: an existing folder.
        model: the model, without adapters.
        weights: its weights.
        dtype: name of the dtype to write.
        log: shows a line to the user.
    """
    files: list[dict[str, tuple[int, ...]]] = []
    held: dict[str, np.ndarray] = {}

    def end_file() -> None:
        if held:
            files.append({name: tensor.shape for name, tensor in held.items()})
            save_file(held, folder / f"part-{len(files)}")
            held.clear()

    for leaf, shape in leaves_by_name(parameter_shapes(model)).items():
        log(f"writing {leaf}")
        whole = np.zeros(shape.shape, jnp.dtype(dtype))
        for indices, values in weights.blocks(leaf):
            whole[np.ix_(*indices)] = values.astype(whole.dtype)
        stacked = int(leaf.startswith("layers."))
        for stack in np.ndindex(whole.shape[:stacked]):
            held[tensor_name(model, leaf, stack)] = np.ascontiguousarray(whole[stack])
        if sum(tensor.nbytes for tensor in held.values()) > FILE_BYTES:
            end_file()
    end_file()
    count = len(files)
    names = [f"model-{number:05}-of-{count:05}.safetensors" for number in range(1, count + 1)]
    for number, name in enumerate(names, 1):
        (folder / f"part-{number}").rename(folder / (name if count > 1 else SINGLE))
    if count > 1:
        sizes = [int(np.prod(shape)) for content in files for shape in content.values()]
        by_file = zip(names, files, strict=True)
        index = {
            "metadata": {"total_size": sum(sizes) * jnp.dtype(dtype).itemsize},
            "weight_map": {tensor: name for name, content in by_file for tensor in content},
        }
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
