from pathlib import Path

import pytest

from geojax.data import Tokenizer


@pytest.fixture(scope="session")
def tokenizer_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer of 300 tokens or a few less."""
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    text = "one two three four five six seven eight nine ten eleven twelve"
    Tokenizer.train([text], vocabulary_size=300).save(path)
    return path


@pytest.fixture(scope="session")
def tokenizer(tokenizer_file: Path) -> Tokenizer:
    return Tokenizer.load(tokenizer_file)
