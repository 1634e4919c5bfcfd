"""Each family trained for 20 steps by two sites, exported, and loaded by transformers: same logits.

What the small models of `test_families` tie is not tied here, and the other way round, and so are
biases of attention where the family has them.
"""

import copy

import jax
import numpy as np
import pytest
import tokenizers
import torch
from lifted import Lifted
from oracle import packed_logits_and_loss
from small_families import FAMILIES
from support import whole_state
from support.plans import step_plan_on
from support.small_models import make_batch
from transformers import AutoModelForCausalLM

from geojax import make_mesh
from geojax.checkpoint import Checkpointer
from geojax.models import logits
from geojax.models.huggingface.checkpoint import model_of, read_model_fields
from geojax.optim import OptimizerSettings, learning_rate_schedule, make_optimizer
from geojax.precision import policy
from geojax.saved_runs.export import export_run
from geojax.step.batches import global_batch, global_signals, sequences_of_process
from geojax.step.program import batch_shape, lower_step
from geojax.step.state import initial_state, state_layouts

STEPS, ROWS, SEQUENCE = 20, 4, 12
SITES = ("east", "west")
VARIANTS = {"llama-tied-biases", "mistral-window", "deepseek-v3-whole-queries"}


def trained(model, mesh):
    """The layouts and the state after the last step, and the losses."""
    settings = OptimizerSettings(peak_learning_rate=1e-2, warmup_steps=2)
    optimizer, schedule = make_optimizer(settings, STEPS), learning_rate_schedule(settings, STEPS)
    plan = step_plan_on(mesh, policy("fp64"))
    layouts = state_layouts(model, optimizer, plan)
    state = initial_state(model, optimizer, layouts, plan, 0)
    lowered = lower_step(layouts, model, plan, optimizer, schedule, batch_shape(ROWS, SEQUENCE))
    program, losses = lowered.compile(), []
    signals = global_signals(plan, {"stop": False, "save": False})
    share = sequences_of_process(plan, ROWS)
    for step in range(STEPS):
        batch = make_batch(model, seed=step % 2, rows=ROWS, sequence=SEQUENCE)
        rows = global_batch(plan, ROWS, share, batch)
        state, metrics = program(state, rows, signals, np.uint32(0))
        losses.append(float(metrics["loss"]))
    return layouts, state, losses


def other(config):
    """The config with its head tied or untied, and with biases of attention or without."""
    made = copy.deepcopy(config)
    made.tie_word_embeddings = not config.tie_word_embeddings
    if hasattr(config, "attention_bias") and config.model_type != "deepseek_v3":
        made.attention_bias = not config.attention_bias
    return made


def write_tokenizer(path, size):
    words = {str(number): number for number in range(2, size)} | {"<s>": 0, "</s>": 1}
    tokenizers.Tokenizer(tokenizers.models.WordLevel(words, "2")).save(str(path))
    return path


@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in VARIANTS])
def test_twenty_steps_and_an_export_give_transformers_the_same_logits(name, tmp_path):
    other(FAMILIES[name][0]).save_pretrained(tmp_path)
    model = model_of(read_model_fields(tmp_path))
    mesh = make_mesh(devices=jax.devices()[:2], dc=2)
    run, export = tmp_path / "run", tmp_path / "export"
    with jax.enable_x64(True):
        layouts, state, losses = trained(model, mesh)
        assert losses[-1] < losses[0] - 0.1, losses
        metadata = {
            "model": model.model_dump(mode="json"),
            "config": {"precision": "fp64", "data": {}},
            "consumed_sequences": STEPS * ROWS,
        }
        with Checkpointer(run / "checkpoints", mesh, sites=SITES) as checkpointer:
            checkpointer.save(STEPS, state, layouts, metadata)
        tokenizer = write_tokenizer(tmp_path / "words.json", model.vocab_size)
        export_run(run, export, tokenizer=tokenizer, log=lambda line: None)
        batch = make_batch(model, seed=9, rows=ROWS, sequence=SEQUENCE)
        weights = whole_state.on_host(state.parameters, layouts.parameters)
        ours = np.asarray(jax.jit(lambda *given: logits(*given, model))(weights, batch))
    with Lifted(), torch.no_grad():
        theirs, report = AutoModelForCausalLM.from_pretrained(
            export,
            dtype=torch.float64,
            attn_implementation="eager",
            experts_implementation="eager",
            output_loading_info=True,
        )
        tensors = {key: torch.from_numpy(leaf) for key, leaf in batch.items()}
        expected = packed_logits_and_loss(theirs, tensors)[0].numpy()
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert np.abs(ours - expected).max() <= 1e-10 * np.abs(expected).max()
