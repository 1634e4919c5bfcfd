import jax
import pytest

from geojax.runtime import naming_lost_contact
from geojax.runtime.last_words import blamed_process, blames_another, lost_contact
from geojax.runtime.peers import _Silence


def test_whoever_stops_renewing_its_sign_is_silent_after_the_limit():
    silence = _Silence(3, 10.0)
    assert silence.processes({"0": "1", "1": "1"}, now=0.0) == []
    assert silence.processes({"0": "2", "1": "1"}, now=9.0) == []
    # Process 2 never came: the barrier that waits for it names it.
    assert silence.processes({"0": "3", "1": "1"}, now=11.0) == [1]
    assert silence.processes({"0": "3", "1": "2"}, now=12.0) == []


def test_what_is_said_of_a_lost_process_is_understood():
    named = lost_contact(": process 12 (site west, host n17), which coordinates the run, is gone")
    assert (blamed_process(named), blames_another(named)) == (12, True)
    assert blamed_process(lost_contact(" (connection closed)")) is None


def test_an_error_of_jax_in_a_lone_process_has_nothing_to_do_with_others():
    with pytest.raises(jax.errors.JaxRuntimeError, match="oops"), naming_lost_contact():
        raise jax.errors.JaxRuntimeError("oops")
