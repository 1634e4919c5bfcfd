import pytest
from support.island_jobs import SETTINGS
from support.small_runs import losses, prepare_corpus, train_in_float64


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    """A small prepared corpus."""
    return prepare_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="session")
def exact_losses(corpus, tmp_path_factory):
    """The losses of 40 steps of the small run of islands and of launched processes, in float64."""
    settings = SETTINGS | {"steps": 40, "evaluation": {}, "checkpoint": {}}
    return losses(train_in_float64(tmp_path_factory.mktemp("float64"), corpus, **settings))
