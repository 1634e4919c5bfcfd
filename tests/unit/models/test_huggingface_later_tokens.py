"""The module for multi-token prediction in checkpoints, by the names that DeepSeek publishes."""

import json
import math

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from geojax.errors import UserError
from geojax.models import ModelConfig, parameter_shapes
from geojax.models.families.deepseek_v3 import DEEPSEEK_V3
from geojax.models.huggingface.checkpoint import HuggingFaceWeights, read_model_fields
from geojax.models.huggingface.tensor_map import TensorMap
from geojax.models.huggingface.write import CheckpointWriter
from geojax.named_arrays import leaves_by_name

H, V, HEADS, EXPERTS = 8, 11, 2, 4
CONFIG = {
    "model_type": "deepseek_v3",
    "hidden_size": H,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "vocab_size": V,
    "q_lora_rank": 6,
    "kv_lora_rank": 5,
    "qk_nope_head_dim": 3,
    "qk_rope_head_dim": 2,
    "v_head_dim": 4,
    "first_k_dense_replace": 1,
    "n_routed_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "moe_intermediate_size": 7,
    "num_nextn_predict_layers": 1,
}
LAYER = {
    "input_layernorm": (H,),
    "post_attention_layernorm": (H,),
    "self_attn.q_a_proj": (6, H),
    "self_attn.q_a_layernorm": (6,),
    "self_attn.q_b_proj": (HEADS * 5, 6),
    "self_attn.kv_a_proj_with_mqa": (5 + 2, H),
    "self_attn.kv_a_layernorm": (5,),
    "self_attn.kv_b_proj": (HEADS * (3 + 4), 5),
    "self_attn.o_proj": (H, HEADS * 4),
}
MODULE = {
    "enorm": (H,),
    "hnorm": (H,),
    "eh_proj": (H, 2 * H),
    "shared_head.norm": (H,),
    "embed_tokens": (V, H),
    "shared_head.head": (V, H),
}
COPIES = {
    "model.layers.2.embed_tokens.weight": "model.embed_tokens.weight",
    "model.layers.2.shared_head.head.weight": "lm_head.weight",
}


def feed_forward(name, width):
    return {
        f"{name}.gate_proj": (width, H),
        f"{name}.up_proj": (width, H),
        f"{name}.down_proj": (H, width),
    }


def published():
    """Random tensors by the names of DeepSeek's `model.safetensors.index.json`."""
    mixture = {"mlp.gate": (EXPERTS, H)} | feed_forward("mlp.shared_experts", 7)
    for expert in range(EXPERTS):
        mixture |= feed_forward(f"mlp.experts.{expert}", 7)
    layers = [LAYER | feed_forward("mlp", 12), LAYER | mixture, LAYER | mixture | MODULE]
    shapes = {"model.embed_tokens.weight": (V, H), "model.norm.weight": (H,)}
    shapes["lm_head.weight"] = (V, H)
    for number, layer in enumerate(layers):
        shapes |= {f"model.layers.{number}.{name}.weight": layer[name] for name in layer}
    for number in (1, 2):
        shapes[f"model.layers.{number}.mlp.gate.e_score_correction_bias"] = (EXPERTS,)
    random = np.random.default_rng(0)
    # The biases by which experts are chosen are published in float32.
    tensors = {
        name: random.standard_normal(shape).astype(
            np.float32 if name.endswith("bias") else ml_dtypes.bfloat16
        )
        for name, shape in shapes.items()
    }
    return tensors | {copy: tensors[source] for copy, source in COPIES.items()}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    save_file(published(), tmp_path / "model.safetensors")
    return tmp_path


def read(weights, name, shape):
    stacked = weights.stacked_dims[name]
    whole = tuple(slice(0, size) for size in shape[stacked:])
    parts = [weights.read(name, stack, whole) for stack in np.ndindex(shape[:stacked])]
    return np.stack(parts).reshape(shape)


def test_a_published_checkpoint_is_written_as_it_was_read(folder, tmp_path_factory):
    model = ModelConfig(**read_model_fields(folder))
    assert model.num_nextn_predict_layers == 1
    weights = HuggingFaceWeights(folder, model)
    weights.check()
    leaves = {
        name: read(weights, name, leaf.shape)
        for name, leaf in leaves_by_name(parameter_shapes(model)).items()
    }
    tensors = published()
    joined = tensors["model.layers.2.eh_proj.weight"].T
    np.testing.assert_array_equal(leaves["mtp.projection.kernel"][0], joined)
    written = tmp_path_factory.mktemp("written")
    with CheckpointWriter(
        written, model, dtype="bfloat16", token_ids={}, file_bytes=2000
    ) as writer:
        for name in writer.leaves:
            writer.put(name, tuple(map(np.arange, leaves[name].shape)), leaves[name])
    files = sorted(written.glob("*.safetensors"))
    assert len(files) > 2
    ours = {name: array for file in files for name, array in load_file(file).items()}
    assert ours.keys() == tensors.keys()
    for name, array in tensors.items():
        assert (ours[name].dtype, ours[name].shape) == (array.dtype, array.shape), name
        assert ours[name].tobytes() == array.tobytes(), name
    assert ModelConfig(**read_model_fields(written)) == model


def test_the_module_may_be_left_unread(folder):
    model = ModelConfig(**read_model_fields(folder)).replace(num_nextn_predict_layers=0)
    HuggingFaceWeights(folder, model).check()


@pytest.mark.parametrize("lacking", [COPIES, "layers.2."], ids=["copies", "module"])
def test_a_checkpoint_may_lack_the_copies_but_not_the_module(tmp_path, lacking):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    model = ModelConfig(**read_model_fields(tmp_path))
    left = COPIES if lacking is COPIES else [name for name in published() if lacking in name]
    kept = {name: array for name, array in published().items() if name not in left}
    save_file(kept, tmp_path / "model.safetensors")
    if lacking is COPIES:
        HuggingFaceWeights(tmp_path, model).check()
        return
    with pytest.raises(UserError, match=r"lacks model.layers.2.enorm.weight and \d+ more tensors"):
        HuggingFaceWeights(tmp_path, model)


def test_the_published_files_hold_685_billion_numbers():
    """As the model's page on the Hub counts them, without the scales of FP8 blocks."""
    model = ModelConfig.load("deepseek-v3-671b").replace(num_nextn_predict_layers=1)
    tensors = TensorMap(DEEPSEEK_V3, model)
    of_copies = sum(math.prod(tensors.tensors[each].shape) for each in tensors.copies.values())
    count = sum(math.prod(tensor.shape) for tensor in tensors.tensors.values()) + of_copies
    assert count == 684_489_845_504
