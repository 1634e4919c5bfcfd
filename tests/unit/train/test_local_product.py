"""The timed product begins behind a step on this device, and all processes agree on it."""

import jax
import numpy as np

from geojax.train.local_product import agreed_count, local_product


def test_process_0_sizes_the_product_and_others_take_its_number():
    told = []
    first = local_product(lambda count: told.append(count) or count, process=0)
    assert told[0] >= 1
    other = local_product(lambda count: told.append(count) or 3, process=1)
    assert told[1] is None
    for dispatch in (first, other):
        assert np.isfinite(dispatch(jax.numpy.float32(2.5)))


def test_without_an_answer_there_is_no_product():
    assert local_product(lambda count: None, process=1) is None


def test_a_number_is_told_once(monkeypatch):
    notes = {}
    monkeypatch.setattr("geojax.train.local_product.publish", notes.__setitem__)
    monkeypatch.setattr(
        "geojax.train.local_product.await_published", lambda key, seconds: notes.get(key)
    )
    assert agreed_count(None, 1.0) is None
    assert (agreed_count(7, 1.0), agreed_count(None, 1.0)) == (7, 7)
    notes["product"] = "many"
    assert agreed_count(None, 1.0) is None
