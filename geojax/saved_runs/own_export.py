"""Export of a model of your own: safetensors by the attributes of its `Decoder`."""

from collections.abc import Callable, Iterator
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file

from geojax.checkpoint.reading.saved_model import SavedModel
from geojax.models import OwnModel, parameter_shapes
from geojax.models.own.parts import own_parts
from geojax.named_arrays import leaves_by_name

FILE_BYTES = 5 * 10**9
"""Bytes after which a file ends."""


def write_own_model(
    folder: Path, model: OwnModel, saved: SavedModel, dtype: str, log: Callable[[str], None]
) -> None:
    """Write the weights of a saved run into an empty folder; each tensor has a block's own name.

    Args:
        folder: an existing folder.
        model: the run's.
        saved: its weights.
        dtype: name of the dtype to write.
        log: shows a line to the user.
    """
    held: dict[str, np.ndarray] = {}
    number = 1
    for name, shape in leaves_by_name(parameter_shapes(model)).items():
        log(f"writing {name}")
        whole = np.zeros(shape.shape, jnp.dtype(dtype))
        for indices, values in saved.blocks(name):
            whole[np.ix_(*indices)] = values.astype(whole.dtype)
        held |= _tensors(model, name, whole)
        if sum(tensor.nbytes for tensor in held.values()) > FILE_BYTES:
            save_file(held, folder / f"model-{number:05}.safetensors")
            held, number = {}, number + 1
    if held:
        save_file(held, folder / f"model-{number:05}.safetensors")


def _tensors(model: OwnModel, name: str, whole: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the tensors of a leaf: that of layers has one for each block."""
    part, _, inside = name.partition(".")
    if part != "layers":
        yield name, whole
        return
    size, place = len(own_parts(model).period), 0
    if size > 1:
        of_place, _, inside = inside.partition(".")
        place = int(of_place)
    for layer, values in enumerate(whole):
        yield f"blocks.{size * layer + place}.{inside}", np.ascontiguousarray(values)
