import pytest
from support.small_runs import prepare_corpus


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    """A small prepared corpus."""
    return prepare_corpus(tmp_path_factory.mktemp("corpus"))
