"""Names of other trainers are refused with the key or the value that is meant."""

import pydantic
import pytest

from geojax.config.foreign_names import FOREIGN_NAMES
from geojax.config.run_config import RunConfig
from geojax.errors import UserError
from geojax.models import ModelConfig
from geojax.settings import Settings, classes_in

WHOLE = ("model.preset", "model.huggingface")
"""Keys of a model that are no setting of one."""


def keys_of(settings, prefix=""):
    for name, field in settings.model_fields.items():
        yield f"{prefix}{name}"
        for inner in classes_in(field.annotation):
            if issubclass(inner, Settings):
                yield from keys_of(inner, f"{prefix}{name}.")


KEYS = {*keys_of(RunConfig), *keys_of(ModelConfig, "model."), *WHOLE}


def key_of(meant):
    return meant.partition(" ")[0].partition("=")[0]


def test_each_key_that_is_meant_exists():
    assert {key_of(meant) for meant in FOREIGN_NAMES.keys.values()} <= KEYS
    assert set(FOREIGN_NAMES.values) <= KEYS


def test_the_table_holds_what_people_type():
    asked = (
        "lr wd bs seq_len tp pp dp fsdp ep cp grad_accum warmup max_steps num_train_epochs "
        "per_device_train_batch_size micro_batch_size tensor_model_parallel_size train_iters "
        "ici_fsdp_parallelism per_device_batch_size base_emb_dim remat_policy bf16 clip_grad"
    )
    assert [name for name in asked.split() if name not in FOREIGN_NAMES.keys] == []
    assert len(FOREIGN_NAMES.keys) > 150


def test_no_foreign_name_is_a_key_of_a_run():
    assert FOREIGN_NAMES.keys.keys() & RunConfig.model_fields.keys() == set()


@pytest.mark.parametrize("name", ["lr", "tp", "num_train_epochs", "per_device_train_batch_size"])
def test_a_name_is_refused_and_no_alias(tmp_path, name):
    path = tmp_path / "run.yaml"
    path.write_text(
        "run_directory: x\nsteps: 1\nmodel: tiny\ndata: {}\n"
        "batch: {global_batch_size: 1, sequence_length: 8}\n"
    )
    with pytest.raises(UserError) as caught:
        RunConfig.load(path, [f"--{name}=1"])
    meant = FOREIGN_NAMES.keys[name]
    assert str(caught.value) == f"--{name}: unknown key; in geojax it is {meant}"
    with pytest.raises(UserError, match="in geojax it is"):
        RunConfig.load(path, [f"--{name.replace('_', '-').upper()}=1"])


def refused_at(key, value):
    """Tell if a value is refused by the type of its key, and not only beside other values."""
    *sections, last = key.split(".")
    settings = RunConfig
    for section in sections:
        settings = classes_in(settings.model_fields[section].annotation)[0]
    try:
        settings.model_validate({last: value})
    except pydantic.ValidationError as error:
        return any(problem["loc"] == (last,) for problem in error.errors())
    return False


def test_each_value_that_is_meant_is_accepted_and_its_name_is_not():
    for key, names in FOREIGN_NAMES.values.items():
        for name, meant in names.items():
            assert not refused_at(key, meant)
            assert refused_at(key, name), f"{key}={name} is a value"
