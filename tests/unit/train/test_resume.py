"""A resumed run: its learning-rate schedule, and the list of what has changed."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.small_models import model_of

from geojax.errors import UserError
from geojax.optim import learning_rate_schedule
from geojax.train.config import RunConfig
from geojax.train.resume import (
    changed_settings,
    refuse_earlier_version,
    refuse_other_schedule,
    schedule_note,
    warmup_note,
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


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 60), min_size=2, max_size=4, unique=True).map(sorted),
    warmup=st.integers(0, 80),
)
def test_learning_rates_are_continuous_over_every_extension(lengths, warmup):
    first = with_saved_schedule(config_of(lengths[0], warmup_steps=warmup), None)
    run = first
    for steps in lengths[1:]:
        run = with_saved_schedule(config_of(steps, warmup_steps=warmup), saved_of(run))
    for step in range(1, lengths[0] + 1):
        assert rate(run, step) == rate(first, step)
    for step in range(lengths[0], lengths[-1] + 1):
        assert rate(run, step) == rate(first, lengths[0])


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


def test_a_checkpoint_without_its_settings_is_refused(tmp_path):
    refuse_earlier_version(tmp_path, None)
    with pytest.raises(UserError, match="written by an earlier version of geojax"):
        refuse_earlier_version(tmp_path, {"model": {}, "step": 3})


def test_an_older_checkpoint_of_another_schedule_is_refused(tmp_path):
    older = saved_of(with_saved_schedule(config_of(20), None))
    newer = saved_of(with_saved_schedule(config_of(30, decay_steps=30), older))
    given_now = config_of(40)
    run = with_saved_schedule(given_now, newer)
    refuse_other_schedule(tmp_path, newer, given_now, run)
    with pytest.raises(UserError, match=r"at step 20, and a damaged newer one at step 30"):
        refuse_other_schedule(tmp_path, older, given_now, run)
