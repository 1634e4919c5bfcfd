import jax
import pytest

from geojax.job.exit_messages import (
    blamed_of_site,
    blamed_process,
    blames_another,
    describe,
    lost_contact,
)
from geojax.runtime import translate_collective_errors


def test_what_is_said_of_a_lost_process_is_understood():
    named = lost_contact(": process 12 (site west, host n17), which coordinates the run, is gone")
    assert (blamed_process(named), blames_another(named)) == (12, True)
    assert blamed_process(lost_contact(" (connection closed)")) is None


@pytest.mark.parametrize(
    "line",
    [
        "error: transport: lost the connection to {}; restart the run",
        "error: transport: {} has been silent for 40 seconds; restart the run",
        "error: transport: lost bucket of step 5, microbatch 0 from {} (a reset); restart the run",
        "geojax watchdog: transport: bucket of step 5 did not come from {}; ending with code 1",
        "geojax watchdog: transport: earlier messages than bucket of step 5 were not fetched by {}",
    ],
)
def test_what_is_said_of_a_lost_site_is_understood(line):
    assert blamed_of_site(line.format("site west (process 3, host n17)")) == ("west", 3)
    assert blamed_of_site(line.format("process 3 (site west, host n17)")) is None


def test_an_error_of_jax_in_a_lone_process_has_nothing_to_do_with_others():
    with pytest.raises(jax.errors.JaxRuntimeError, match="oops"), translate_collective_errors():
        raise jax.errors.JaxRuntimeError("oops")


def test_a_message_names_a_few_of_many_processes():
    assert describe([3]) == "process 3"
    assert describe([3, 9]) == "process 3 and process 9"
    assert describe(range(3072)).endswith("and process 7 and 3064 more")
    assert describe([3], 12) == "process 3 and 11 more"
