"""Runs with real processes: eleven of them in continuous integration, all with --all."""

import pytest
from support.island_jobs import SETTINGS
from support.small_runs import losses, prepare_corpus, train_in_float64

RING = {
    # Resumed with the same bits, or from what sites have in common.
    "test_train.py::test_a_killed_run_goes_on_with_the_same_bits",
    "test_islands.py::test_jobs_go_on_from_their_newest_common_checkpoint_with_the_same_bits",
    # Killed.
    "test_launch.py::test_whatever_fails_the_run_goes_on_as_one_process_would",
    "test_islands.py::test_a_lost_site_ends_the_run_and_is_named",
    # Killed, and the others go on; of three sites the first.
    "test_going_on.py::test_the_others_go_on_with_the_same_bits_and_all_resume",
    # Six faults of three sites, one after the other.
    "test_chaos.py::test_a_run_recovers_from_faults_of_its_sites",
    # Equal to one process.
    "test_train.py::test_a_run_leaves_everything_behind",
    "test_islands.py::test_two_jobs_train_as_one_program",
    # FP8, and weights from and to Hugging Face's files.
    "test_weights_in_and_out.py::test_weights_come_in_are_trained_in_fp8_and_go_out",
    # A model of anybody's modules.
    "test_runs_of_own_models.py::test_a_state_space_trains_in_one_program_and_resumes_to_the_bit",
}
"""Both joins: eleven runs, one of which is a test with two parameters."""


def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.parent.name == "integration":
            name = f"{item.path.name}::{item.originalname}"
            if name not in RING:
                item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    """A small prepared corpus."""
    return prepare_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="session")
def exact_losses(corpus, tmp_path_factory):
    """The losses of 40 steps of the small run of islands and of launched processes, in float64."""
    settings = SETTINGS | {"steps": 40, "evaluation": {}, "checkpoint": {}}
    return losses(train_in_float64(tmp_path_factory.mktemp("float64"), corpus, **settings))
