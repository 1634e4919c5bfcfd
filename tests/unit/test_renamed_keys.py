"""An old config key is an error that names the new one, wherever it is given."""

import re

import pytest
import yaml

from geojax.config.run_config import RunConfig
from geojax.data import PrepareSettings
from geojax.errors import UserError
from geojax.models import ModelConfig
from geojax.renamed_keys import MODEL_KEYS, MODEL_VALUES, RUN_KEYS, RUN_VALUES
from geojax.settings import validate

_SIZES = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "vocab_size": 100,
    "max_position_embeddings": 16,
}


_RUN = {"run_directory": "runs/x", "steps": 1, "model": "tiny", "data": {}}
_RUN |= {"batch": {"global_batch_size": 8, "sequence_length": 16}}


def nested(key, value):
    """The dotted `key` as mappings in mappings."""
    for part in reversed(key.split(".")):
        value = {part: value}
    return value


def merged(content, change):
    """`content` with what `change` says, group by group."""
    both = dict(content)
    for key, value in change.items():
        inner = both.get(key)
        both[key] = merged(inner, value) if isinstance(inner, dict) else value
    return both


def refusal(settings, content, source):
    with pytest.raises(UserError) as error:
        validate(settings, content, source)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(("old", "new"), MODEL_KEYS.items())
def test_every_old_model_key_names_its_successor(old, new, tmp_path):
    found = refusal(ModelConfig, merged(_SIZES, nested(old, 1)), "model.yaml")
    assert found == f"model.yaml: {old}: renamed; use {new}"
    model = merged({"preset": "tiny"}, nested(old, 1))
    found = refusal(RunConfig, _RUN | {"model": model}, "run.yaml")
    assert found == f"run.yaml: model.{old}: renamed; use model.{new}"


@pytest.mark.parametrize(("old", "new"), RUN_KEYS.items())
def test_every_old_run_key_names_its_successor(old, new, tmp_path):
    found = refusal(RunConfig, merged(_RUN, nested(old, 1)), "run.yaml")
    assert found.startswith(f"run.yaml: {old}: renamed; use {new}")

    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(_RUN))
    with pytest.raises(UserError, match=re.escape(f"{old}: renamed; use {new}")):
        RunConfig.load(path, [f"--{old}", "1"])


@pytest.mark.parametrize(
    ("settings", "values"), [(ModelConfig, MODEL_VALUES), (RunConfig, RUN_VALUES)]
)
def test_every_old_value_names_its_successor(settings, values):
    base = _SIZES if settings is ModelConfig else _RUN
    for (key, old), new in values.items():
        found = refusal(settings, merged(base, nested(key, old)), "a.yaml")
        assert found == f"a.yaml: {key}: {old} was renamed; use {new}"


def test_a_preset_file_with_old_keys_is_refused(tmp_path):
    (tmp_path / "model.yaml").write_text("layers: 2\n")
    with pytest.raises(UserError, match=r"model\.yaml: layers: renamed; use num_hidden_layers"):
        validate(RunConfig, _RUN | {"model": str(tmp_path / "model.yaml")}, "run.yaml")


@pytest.mark.parametrize(("settings", "keys"), [(ModelConfig, MODEL_KEYS), (RunConfig, RUN_KEYS)])
def test_every_new_key_exists(settings, keys):
    for new in keys.values():
        for key in new.removesuffix(" (its opposite)").replace(" and ", ", ").split(", "):
            group = settings
            for part in key.split("."):
                group = group.model_fields[part].annotation


def test_old_keys_of_prepared_data_name_their_successors():
    source = {"name": "text", "files": ["a.txt"]}
    content = {"output": "data", "sources": [source], "vocabulary_size": 300}
    found = refusal(PrepareSettings, content, "data.yaml")
    assert found == "data.yaml: vocabulary_size: renamed; use vocab_size"
    content = {"output": "data", "sources": [source | {"hold_out": 0.1}]}
    found = refusal(PrepareSettings, content, "data.yaml")
    assert found == "data.yaml: sources.0.hold_out: renamed; use sources.0.validation_fraction"
