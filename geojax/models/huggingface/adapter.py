"""Adapters as `peft` keeps them: adapter_config.json and adapter_model.safetensors."""

import json
from collections.abc import Mapping
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import safetensors.numpy

from geojax.errors import UserError
from geojax.models.config import ModelConfig
from geojax.models.huggingface.family import Family
from geojax.models.huggingface.tensor_map import TensorMap
from geojax.models.lora import LORA_A, LORA_B

_PARTS = {LORA_A: "lora_A", LORA_B: "lora_B"}
"""Names of the two matrices by those of our leaves."""


def write_adapter(
    folder: Path,
    family: Family,
    model: ModelConfig,
    adapters: Mapping[str, np.ndarray],
    *,
    dtype: str,
    base: Path,
) -> None:
    """Write the files that `PeftModel.from_pretrained` reads.

    Args:
        folder: an existing folder.
        family: that of the weights in `base`.
        model: the model, with adapters.
        adapters: their leaves, whole, by name.
        dtype: name of the dtype to write, as "float32".
        base: folder of the weights that they adapt.

    Raises:
        UserError: the family fuses what an adapter belongs to with something else, or has the
            model beside others, where peft looks for its layers by other names.
    """
    assert model.lora is not None, "the model must have adapters"
    if family.nested_in is not None:
        raise UserError(
            f"geojax export: {base} holds more than the text model of {family.model_type}, whose "
            "layers have other names there; export without --adapter"
        )
    locations = TensorMap(family, model.base)
    tensors: dict[str, np.ndarray] = {}
    targets: set[str] = set()
    for name, leaf in adapters.items():
        owner, _, kind = name.rpartition(".")
        for stack in np.ndindex(leaf.shape[:-2]):
            tensor = locations.locate(f"{owner}.kernel", stack).tensor
            if not tensor.rule.transposed or len(tensor.rule.leaves) > 1:
                raise UserError(
                    f"geojax export: {tensor.name} of {family.model_type} is no linear layer of "
                    f"its own, which peft could adapt as {owner}; export without --adapter"
                )
            module = tensor.name.removesuffix(".weight")
            targets.add(module.rpartition(".")[2])
            key = f"base_model.model.{module}.{_PARTS[kind]}.weight"
            tensors[key] = np.ascontiguousarray(leaf[stack].T).astype(jnp.dtype(dtype))
    safetensors.numpy.save_file(
        tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"}
    )
    alpha = model.lora.alpha
    content = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base),
        "r": model.lora.rank,
        "lora_alpha": int(alpha) if alpha.is_integer() else alpha,
        "lora_dropout": 0.0,
        "target_modules": sorted(targets),
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": model.lora.use_rslora,
        "inference_mode": True,
    }
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
