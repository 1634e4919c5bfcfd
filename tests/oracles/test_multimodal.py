"""Gemma 3 with a vision encoder: its text model is read, and taken home by itself."""

import jax
import numpy as np
import torch
from lifted import Lifted
from small_families import FAMILIES
from support.plans import step_plan_on
from transformers import AutoModelForCausalLM, Gemma3Config, Gemma3ForConditionalGeneration

from geojax import make_mesh
from geojax.checkpoint.reading.initial_weights import read_weights
from geojax.models import logits
from geojax.models.huggingface.checkpoint import HuggingFaceWeights, model_of, read_model_fields
from geojax.models.huggingface.write import CheckpointWriter
from geojax.named_arrays import leaves_by_name
from geojax.precision import policy
from geojax.step.state import parameter_layouts

VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}


def logits_of_transformers(model, tokens):
    found = model(input_ids=torch.from_numpy(tokens).long(), use_cache=False)
    return found.logits.detach().numpy()


def test_the_text_model_is_read_and_written_by_itself(tmp_path):
    text = FAMILIES["gemma3"][0].to_dict() | {"tie_word_embeddings": True}
    config = Gemma3Config(text_config=text, vision_config=VISION, mm_tokens_per_image=4)
    tokens = np.random.default_rng(0).integers(0, text["vocab_size"], (2, 12), np.int32)
    torch.manual_seed(0)
    with Lifted():
        theirs = Gemma3ForConditionalGeneration._from_config(config, attn_implementation="eager")
        for parameter in theirs.parameters():  # not 1 and 0 either
            parameter.data += 0.1 * torch.randn(parameter.shape)
        theirs.save_pretrained(tmp_path / "whole")
        expected = logits_of_transformers(theirs.eval(), tokens)
    model = model_of(read_model_fields(tmp_path / "whole"))
    batch = {
        "tokens": tokens,
        "segment_ids": np.ones_like(tokens),
        "row": np.arange(len(tokens), dtype=np.int32),
        "positions": np.broadcast_to(np.arange(tokens.shape[1], dtype=np.int32), tokens.shape),
    }
    with jax.enable_x64(True):
        plan = step_plan_on(make_mesh(devices=jax.devices()[:1]), policy("fp64"), zero_stage=0)
        weights = read_weights(
            HuggingFaceWeights(tmp_path / "whole", model),
            parameter_layouts(model, plan),
            plan.mesh,
        )
        ours = np.asarray(jax.jit(lambda *given: logits(*given, model))(weights, batch))
        leaves = leaves_by_name(jax.device_get(weights))
    assert np.abs(ours - expected).max() <= 1e-10 * np.abs(expected).max()
    export = tmp_path / "text"
    export.mkdir()
    with CheckpointWriter(export, model, dtype="float64", token_ids={}) as writer:
        for name in writer.leaves:
            writer.put(name, tuple(map(np.arange, leaves[name].shape)), leaves[name])
    with Lifted():
        alone, report = AutoModelForCausalLM.from_pretrained(
            export, dtype=torch.float64, attn_implementation="eager", output_loading_info=True
        )
        again = logits_of_transformers(alone, tokens)
    assert type(alone).__name__ == "Gemma3ForCausalLM"
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    np.testing.assert_array_equal(again, expected)
