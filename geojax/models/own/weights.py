"""The weights of a model of your own in safetensors files, as `geojax export` writes them.

A tensor has the name of its attributes in the `Decoder`: blocks.3.mix.kernel is of the fourth
block.
"""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from geojax.models.huggingface.tensor_map import Slices
from geojax.models.huggingface.weight_files import Header, WeightFiles
from geojax.models.own.parts import own_parts
from geojax.models.own.settings import OwnModel
from geojax.named_arrays import leaves_by_name


def tensor_name(model: OwnModel, leaf: str, stack: tuple[int, ...]) -> str:
    """Return the name of the tensor that holds a leaf's part for one layer.

    Args:
        model: the model.
        leaf: dotted name in the parameter tree.
        stack: the layer's number; () of what is in no layer.
    """
    part, _, inside = leaf.partition(".")
    if part != "layers":
        return leaf
    size, place, (layer,) = len(own_parts(model).period), 0, stack
    if size > 1:
        of_place, _, inside = inside.partition(".")
        place = int(of_place)
    return f"blocks.{size * layer + place}.{inside}"


class OwnWeights:
    """The weights of a model of your own in the files of a folder."""

    def __init__(self, folder: Path, model: OwnModel) -> None:
        """Open `folder`; no weight is read.

        Raises:
            UserError: it holds no safetensors, or those of other attributes.
        """
        self.folder, self._model = folder, model
        self._headers: dict[str, Header] = {}
        self.stacked_dims: Mapping[str, int] = {}
        for leaf, declared in leaves_by_name(own_parts(model).declarations).items():
            stacked = int(leaf.startswith("layers."))
            self.stacked_dims[leaf] = stacked
            for stack in np.ndindex(declared.shape[:stacked]):
                self._headers[tensor_name(model, leaf, stack)] = Header(declared.shape[stacked:])
        self._files = WeightFiles(folder)
        self._files.check_names(self._headers, None)

    def check(self) -> None:
        """Check the shapes and dtypes of all tensors, for which every file is opened.

        Raises:
            UserError: one differs from the model's, or a file is missing or damaged.
        """
        self._files.check_headers(self._headers)

    def digest(self) -> str:
        """Return a digest that tells one model's weights from another's; see `WeightFiles.digest`.

        Raises:
            UserError: see `check`.
        """
        return self._files.digest(self._headers)

    def read(self, leaf: str, stack: tuple[int, ...], slices: Slices) -> np.ndarray:
        """Read `slices` of a leaf's part for one layer, in the file's dtype."""
        return self._files.read(tensor_name(self._model, leaf, stack), slices)
