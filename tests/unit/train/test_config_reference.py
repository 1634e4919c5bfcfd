"""The page of all config keys says what the settings classes say."""

import importlib.util
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[3]


def test_the_committed_page_is_what_the_script_writes():
    script = REPOSITORY / "docs" / "config_reference.py"
    spec = importlib.util.spec_from_file_location("config_reference", script)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.PAGE.read_text() == module.page(), "run: python docs/config_reference.py"
