"""The config and the weights of a Hugging Face checkpoint, in a folder."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pydantic

from geojax.errors import UserError
from geojax.json_file import load_json
from geojax.models.config import ModelConfig, family_settings
from geojax.models.families import FAMILIES
from geojax.models.huggingface.family import HEAD, TABLE, TRAINING_FIELDS, Family
from geojax.models.huggingface.mxfp4 import headers_of, is_in_blocks, read_blocks
from geojax.models.huggingface.not_carried import describe_not_carried
from geojax.models.huggingface.tensor_map import Slices, TensorMap
from geojax.models.huggingface.weight_files import Header, WeightFiles
from geojax.models.own.settings import AnyModel
from geojax.suggestions import listed

CONFIG = "config.json"

# With any of them weights compute what they were trained to.
_FREE_FIELDS = TRAINING_FIELDS | {
    "capacity_factor",
    "lora",
    "max_position_embeddings",
    "num_nextn_predict_layers",
}


def read_model_fields(folder: Path) -> dict[str, Any]:
    """Read the fields of a `ModelConfig` from the `config.json` in `folder`.

    Raises:
        UserError: the file is missing, or describes a model that geojax does not carry.
    """
    content = load_json(folder / CONFIG)
    return _family_of(content, folder).read_config(content, str(folder / CONFIG))


def model_of(fields: Mapping[str, Any]) -> ModelConfig:
    """Make the model of some fields, in the class of its family where that has one of its own.

    Raises:
        pydantic.ValidationError: a field has a wrong value.
    """
    return family_settings(fields)(**fields)


def other_settings(folder: Path, model: AnyModel) -> list[str]:
    """List the fields of `model` that the `config.json` in `folder` tells otherwise.

    With them the weights compute something else than what they were trained to. A `config.json`
    that describes no model which geojax carries tells nothing.
    """
    try:
        trained = model_of(read_model_fields(folder))
    except (UserError, pydantic.ValidationError):
        return []
    fields = (name for name in type(trained).model_fields if name not in _FREE_FIELDS)
    return [name for name in fields if getattr(trained, name) != getattr(model, name)]


def family_for(model: ModelConfig) -> Family:
    """Return the family that `model` is written as.

    Raises:
        UserError: none can express it; the message names the nearest.
    """
    nearest, fewest = FAMILIES[0], FAMILIES[0].unsupported_reasons(model)
    for family in FAMILIES:
        reasons = family.unsupported_reasons(model)
        if not reasons:
            return family
        if len(reasons) < len(fewest):
            nearest, fewest = family, reasons
    raise UserError(
        f"the model is of no family that transformers has; the nearest, {nearest.model_type}, "
        f"cannot have {listed(fewest)}"
    )


class HuggingFaceWeights:
    """The weights of a model in the safetensors files of a folder."""

    def __init__(self, folder: Path, model: ModelConfig) -> None:
        """Open `folder`; no weight is read.

        Raises:
            UserError: its `config.json` is of another architecture than `model`, its weights are
                quantized in a way that is not read, or its tensors have other names.
        """
        content = load_json(folder / CONFIG)
        family = _family_of(content, folder)
        if (reason := family.unsupported_reason(model)) is not None:
            raise UserError(
                f"{folder / CONFIG}: model_type {family.model_type} cannot have "
                f"the model's {reason}"
            )
        self.folder, self.family = folder, family
        self._is_quantized = family.is_quantized(content, str(folder / CONFIG))
        self._map = TensorMap(family, model)
        self._headers: dict[str, Header] = {}
        for tensor in self._map.tensors.values():
            if self._is_quantized and is_in_blocks(tensor):
                self._headers |= headers_of(tensor)
            else:
                self._headers[tensor.name] = Header(tensor.shape)
        self._files = WeightFiles(folder, family.base_prefix)
        self._head = family.tensor_of(HEAD) if model.tie_word_embeddings else None
        self._table = family.tensor_of(TABLE)
        self._files.check_names(self._headers, _ignored(family, model, self._map))

    @property
    def stacked_dims(self) -> Mapping[str, int]:
        """Number of leading dims of each leaf, by name, that count layers and experts."""
        return self._map.stacked_dims

    def check(self) -> None:
        """Check the shapes and dtypes of all tensors, for which every file is opened.

        A head that is there though the model ties it is compared with the embedding: transformers
        does not tie them where they differ.

        Raises:
            UserError: one differs from the model's, or a file is missing or damaged.
        """
        self._files.check_headers(self._headers)
        head, table = self._head, self._table
        if head in self._files.file_of and not self._files.are_equal(head, table):
            raise UserError(
                f"{self._files.source}: {head} differs from {table}, and tie_word_embeddings is "
                "true; set model.tie_word_embeddings to false to read both, as transformers does"
            )

    def digest(self) -> str:
        """Return a digest that tells one model's weights from another's; see `WeightFiles.digest`.

        Raises:
            UserError: see `check`.
        """
        return self._files.digest(self._headers)

    def read(self, leaf: str, stack: tuple[int, ...], slices: Slices) -> np.ndarray:
        """Read `slices` of a leaf's part for one layer (and expert).

        They are in the file's dtype, or in float32 where that holds them in blocks.
        """
        location = self._map.locate(leaf, stack)
        name, part = location.tensor.name, location.in_tensor(slices)
        if self._is_quantized and is_in_blocks(location.tensor):
            return read_blocks(self._files, name, part)
        return location.transpose(self._files.read(name, part))


def _family_of(content: Mapping[str, Any], folder: Path) -> Family:
    known = {family.model_type: family for family in FAMILIES}
    given = content.get("model_type")
    if not isinstance(given, str) or given not in known:
        raise UserError(f"{folder / CONFIG}: {describe_not_carried(given, known)}")
    return known[given]


def _ignored(family: Family, model: ModelConfig, tensors: TensorMap) -> str | None:
    """Return the pattern of tensors that may be there and are not read."""
    patterns = [family.ignored_tensors] if family.ignored_tensors else []
    if model.tie_word_embeddings:  # some checkpoints hold the embedding under both names
        patterns.append(re.escape(family.tensor_of(HEAD)))
    patterns += map(re.escape, tensors.copies)
    if family.copies and not model.num_nextn_predict_layers:  # modules that are not wanted
        patterns.append(rf"model\.layers\.{model.num_hidden_layers}\..*")
    return "|".join(patterns) or None
