"""The page of all config keys says what the settings classes say."""

import importlib.util
from pathlib import Path

import pytest

from geojax.cli.config_keys import config_sections
from geojax.optim.registry import OPTIMIZERS
from geojax.pipeline.registry import SCHEDULES

REPOSITORY = Path(__file__).resolve().parents[3]


def test_the_committed_page_is_what_the_script_writes():
    script = REPOSITORY / "docs" / "config_reference.py"
    spec = importlib.util.spec_from_file_location("config_reference", script)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.PAGE.read_text() == module.page(), "run: python docs/config_reference.py"


@pytest.mark.parametrize(
    ("key", "registry"), [("optimizer.name", OPTIMIZERS), ("pipeline.schedule", SCHEDULES)]
)
def test_the_meaning_of_a_name_lists_every_entry_of_its_registry(key, registry):
    settings = [each for section in config_sections() for each in section.settings]
    meaning = next(each.meaning for each in settings if each.key == key)
    assert [name for name in registry if f'"{name}"' not in meaning] == []
