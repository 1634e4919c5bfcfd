import jax
import pytest

from geojax.runtime import naming_lost_contact
from geojax.runtime.last_words import blamed_process, blames_another, lost_contact
from geojax.runtime.signs_of_life import Silence


def test_whoever_stops_renewing_its_sign_is_silent_after_the_limit():
    silence = Silence(2, 10.0, now=0.0)
    assert silence.processes({"0": "1", "1": "1"}, now=1.0) == []
    assert silence.processes({"0": "2", "1": "1"}, now=11.0) == []
    assert silence.processes({"0": "3", "1": "1"}, now=12.0) == [1]
    assert silence.processes({"0": "3", "1": "2"}, now=13.0) == []


def test_whoever_gives_no_sign_at_all_is_silent_from_the_beginning():
    silence = Silence(2, 10.0, now=5.0)
    assert silence.processes({"0": "1"}, now=15.0) == []
    assert silence.processes({"0": "2"}, now=15.5) == [1]


def test_what_is_said_of_a_lost_process_is_understood():
    named = lost_contact(": process 12 (site west, host n17), which coordinates the run, is gone")
    assert (blamed_process(named), blames_another(named)) == (12, True)
    assert blamed_process(lost_contact(" (connection closed)")) is None


def test_an_error_of_jax_in_a_lone_process_has_nothing_to_do_with_others():
    with pytest.raises(jax.errors.JaxRuntimeError, match="oops"), naming_lost_contact():
        raise jax.errors.JaxRuntimeError("oops")
