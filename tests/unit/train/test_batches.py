import jax
import numpy as np
import pytest
from support.plans import step_plan_on

from geojax import make_mesh
from geojax.models.parallel.sequence_order import position_order
from geojax.precision import policy
from geojax.step.batches import global_batch, global_signals, sequences_of_process
from geojax.step.plan import SIGNALS


@pytest.mark.parametrize("axes", [{"data": 8}, {"dc": 2, "data": 4}, {"dc": 4, "expert": 2}])
def test_a_batch_arrives_whole_and_in_order(axes):
    plan = step_plan_on(make_mesh(**axes), policy("fp32"))
    rows = sequences_of_process(plan, 16)
    assert rows == list(range(16)), "one process holds every row"
    local = {"tokens": np.arange(16 * 3).reshape(16, 3), "row": np.arange(16)}
    batch = global_batch(plan, 16, rows, local)
    for name, leaf in batch.items():
        np.testing.assert_array_equal(leaf, local[name])
        assert {shard.data.shape[0] for shard in leaf.addressable_shards} == {2}


@pytest.mark.parametrize("method", ["ring", "ulysses"])
def test_ranks_that_share_rows_hold_their_columns(method):
    plan = step_plan_on(make_mesh(data=2, context=4), policy("fp32"), context_method=method)
    local = {"tokens": np.arange(4 * 16).reshape(4, 16), "row": np.arange(4)}
    batch = global_batch(plan, 4, sequences_of_process(plan, 4), local)
    order = position_order(16, plan.parallelism)
    np.testing.assert_array_equal(batch["tokens"], local["tokens"][:, order])
    assert {shard.data.shape for shard in batch["tokens"].addressable_shards} == {(2, 4)}
    assert {shard.data.shape for shard in batch["row"].addressable_shards} == {(2,)}


def test_what_a_process_asks_is_said_once():
    plan = step_plan_on(make_mesh(dc=2, data=2, tensor=2), policy("fp32"))
    asked = dict.fromkeys(SIGNALS, False) | {"stop": True}
    signals = global_signals(plan, asked)
    totals = np.asarray(signals).sum(axis=0)
    np.testing.assert_array_equal(totals, [float(asked[name]) for name in SIGNALS])
    assert signals.shape == (8, len(SIGNALS))
    assert len(signals.sharding.device_set) == len(jax.devices())
