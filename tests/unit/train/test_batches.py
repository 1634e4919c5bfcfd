import jax
import numpy as np
import pytest

from geojax import make_mesh
from geojax.train.batches import global_batch, global_signals, rows_of_process
from geojax.train.step import SIGNALS


@pytest.mark.parametrize("axes", [{"data": 8}, {"dc": 2, "data": 4}, {"dc": 4, "expert": 2}])
def test_a_batch_arrives_whole_and_in_order(axes):
    mesh = make_mesh(**axes)
    rows = rows_of_process(mesh, 16)
    assert rows == list(range(16)), "one process holds every row"
    local = {"tokens": np.arange(16 * 3).reshape(16, 3), "row": np.arange(16)}
    batch = global_batch(mesh, 16, rows, local)
    for name, leaf in batch.items():
        np.testing.assert_array_equal(leaf, local[name])
        assert {shard.data.shape[0] for shard in leaf.addressable_shards} == {2}


def test_what_a_process_asks_is_said_once():
    mesh = make_mesh(dc=2, data=4)
    asked = dict.fromkeys(SIGNALS, False) | {"stop": True}
    signals = global_signals(mesh, asked)
    totals = np.asarray(signals).sum(axis=0)
    np.testing.assert_array_equal(totals, [float(asked[name]) for name in SIGNALS])
    assert signals.shape == (8, len(SIGNALS))
    assert len(signals.sharding.device_set) == len(jax.devices())
