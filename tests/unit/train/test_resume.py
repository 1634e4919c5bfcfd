"""A resumed run: its learning-rate schedule, and the list of what has changed."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.small_models import model_of

from geojax.checkpoint.reading.compatibility import refuse_earlier_version, refuse_other_model
from geojax.config.run_config import RunConfig
from geojax.errors import UserError
from geojax.models import ModelConfig
from geojax.optim import SCHEDULES, learning_rate_schedule
from geojax.train.resume import (
    changed_settings,
    jump_note,
    refuse_other_schedule,
    schedule_note,
    warmup_note,
    with_saved_model,
    with_saved_schedule,
)

MODEL = model_of("llama")


def config_of(steps, *, rows=8, **optimizer):
    return RunConfig(
        run_directory="run",
        steps=steps,
        model=MODEL,
        data={},
        batch={"global_batch_size": rows, "sequence_length": 32},
        optimizer=optimizer,
    )


def saved_of(config):
    """Metadata of a checkpoint of `config`, a run from scratch or a resumed one."""
    return {"config": config.model_dump(mode="json"), "step": config.steps, "consumed_sequences": 0}


def rate(config, step):
    return float(learning_rate_schedule(config.optimizer, config.steps)(step))


def rates(config, steps):
    # One length for all, so that JAX compiles each operation once.
    schedule = learning_rate_schedule(config.optimizer, config.steps)
    return np.broadcast_to(schedule(np.arange(1, 161)), 160)[:steps]


@settings(max_examples=40)
@given(
    lengths=st.lists(st.integers(1, 60), min_size=2, max_size=4, unique=True).map(sorted),
    warmup=st.integers(0, 80),
    schedule=st.sampled_from(sorted(SCHEDULES)),
)
def test_learning_rates_are_continuous_over_every_extension(lengths, warmup, schedule):
    chosen = {"warmup_steps": warmup, "schedule": schedule}
    first = with_saved_schedule(config_of(lengths[0], **chosen), None)
    run = first
    for steps in lengths[1:]:
        saved = saved_of(run)
        run = with_saved_schedule(config_of(steps, **chosen), saved)
        assert jump_note(saved, run) is None
    before, after = rates(first, lengths[-1]), rates(run, lengths[-1])
    np.testing.assert_array_equal(after, before)
    if SCHEDULES[schedule].has_end:
        np.testing.assert_array_equal(after[lengths[0] :], after[lengths[0] - 1])


@settings(max_examples=40)
@given(
    trunk=st.integers(1, 60),
    decay=st.integers(1, 30),
    warmup=st.integers(0, 80),
    longer=st.integers(0, 20),
)
def test_a_decay_that_branches_off_a_constant_rate_is_continuous(trunk, decay, warmup, longer):
    constant = with_saved_schedule(config_of(trunk, warmup_steps=warmup, schedule="constant"), None)
    branch = {"warmup_steps": warmup, "schedule": "wsd", "wsd_decay_steps": decay}
    run = with_saved_schedule(config_of(trunk + decay, **branch), saved_of(constant))
    assert run.optimizer.decay_steps == trunk + decay
    again = with_saved_schedule(config_of(trunk + decay + longer, **branch), saved_of(run))
    rate = rates(again, trunk + decay + longer)
    if warmup <= trunk:
        assert jump_note(saved_of(constant), run) is None
        np.testing.assert_allclose(rate[:trunk], rates(constant, trunk), rtol=1e-5)
        np.testing.assert_allclose(rate[trunk + decay - 1 :], 3e-5, rtol=1e-5)
        assert np.diff(rate[trunk - 1 :]).min(initial=0) >= -1.001 * (3e-4 - 3e-5) / decay


def test_a_jump_of_the_rate_is_said():
    constant = with_saved_schedule(config_of(50, warmup_steps=5, schedule="constant"), None)
    branch = {"warmup_steps": 5, "schedule": "wsd", "wsd_decay_steps": 40}
    run = with_saved_schedule(config_of(60, **branch), saved_of(constant))
    assert "the learning rate jumps at step 50, from 0.0003 to 9.75e-05" in jump_note(
        saved_of(constant), run
    )


def test_twenty_steps_extended_to_thirty_neither_fall_nor_rise_again():
    saved = saved_of(with_saved_schedule(config_of(20), None))
    run = with_saved_schedule(config_of(30), saved)
    np.testing.assert_allclose([rate(run, step) for step in (20, 21, 30)], 3e-4, rtol=1e-6)
    note = schedule_note(saved["config"], run)
    assert "ends at step 20; --optimizer.decay_steps 30 plans it anew" in note


def test_a_warm_up_that_takes_the_whole_run_is_said():
    assert warmup_note(config_of(20, warmup_steps=19)) is None
    assert "optimizer.warmup_steps below 20" in warmup_note(config_of(20))


def test_a_schedule_is_planned_anew_when_asked_for():
    saved = saved_of(with_saved_schedule(config_of(20, warmup_steps=5), None))
    run = with_saved_schedule(config_of(30, warmup_steps=5, decay_steps=30), saved)
    assert rate(run, 20) > rate(with_saved_schedule(config_of(20, warmup_steps=5), None), 20)
    assert schedule_note(saved["config"], run) is None
    changes = [str(change) for change in changed_settings(saved["config"], run)]
    assert changes == ["steps 20 -> 30", "optimizer.decay_steps 20 -> 30"]


def test_changes_are_listed_by_key_with_both_values():
    saved = saved_of(with_saved_schedule(config_of(20), None))["config"]
    del saved["seed"]
    run = with_saved_schedule(config_of(20, rows=4, clip_norm=None), None)
    changes = [str(change) for change in changed_settings(saved, run)]
    assert sorted(changes) == [
        "batch.global_batch_size 8 -> 4",
        "optimizer.clip_norm 1.0 -> null",
        "seed absent -> 0",
    ]
    assert changed_settings(run.model_dump(mode="json"), run) == []


def test_a_latent_model_saved_before_its_norms_had_a_key_keeps_their_number():
    sizes = {"q_lora_rank": 6, "kv_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4}
    model = {"num_hidden_layers": 2, "hidden_size": 16, "num_attention_heads": 2, **sizes}
    model |= {"intermediate_size": 24, "vocab_size": 61, "max_position_embeddings": 64}
    config = config_of(20).model_copy(update={"model": ModelConfig(**model)})
    assert config.model.latent_norm_eps == 1e-6
    saved = saved_of(config)
    saved["model"] = saved["config"]["model"]
    assert with_saved_model(config, saved) == with_saved_model(config, None) == config
    del saved["model"]["latent_norm_eps"]
    resumed = with_saved_model(config, saved)
    assert resumed.model == config.model.replace(latent_norm_eps=config.model.rms_norm_eps)
    assert changed_settings(saved["config"], resumed) == []
    refuse_other_model(Path("run"), saved["model"], resumed.model.model_dump(mode="json"))
    again = saved_of(resumed)
    again["model"] = again["config"]["model"]
    assert with_saved_model(config, again) == resumed
    chosen = config.model_copy(update={"model": ModelConfig(**model, latent_norm_eps=1e-6)})
    assert with_saved_model(chosen, saved) == chosen
    with pytest.raises(UserError, match=r"model\.latent_norm_eps is 1e-05 there and 1e-06 here"):
        refuse_other_model(Path("run"), saved["model"], chosen.model.model_dump(mode="json"))
    dense = saved_of(config_of(20))
    dense["model"] = dense["config"]["model"]
    del dense["model"]["latent_norm_eps"]
    assert with_saved_model(config_of(20), dense) == config_of(20)


def test_a_checkpoint_without_its_settings_is_refused(tmp_path):
    refuse_earlier_version(tmp_path, None)
    with pytest.raises(UserError, match="an earlier version of geojax wrote this checkpoint"):
        refuse_earlier_version(tmp_path, {"model": {}, "step": 3})


def test_an_older_checkpoint_of_another_schedule_is_refused(tmp_path):
    older = saved_of(with_saved_schedule(config_of(20), None))
    newer = saved_of(with_saved_schedule(config_of(30, decay_steps=30), older))
    given_now = config_of(40)
    run = with_saved_schedule(given_now, newer)
    refuse_other_schedule(tmp_path, newer, given_now, run)
    with pytest.raises(UserError, match="at step 20, but a newer, damaged checkpoint ends it at"):
        refuse_other_schedule(tmp_path, older, given_now, run)
