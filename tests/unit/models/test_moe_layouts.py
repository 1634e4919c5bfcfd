"""Mixtures on several devices: the numbers of one device, and the bytes of their windows."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from mixtures import block_inputs, model_with, moe_model, spread_blocks, uneven_parameters
from spread_model import assert_close, mesh_of, spread, spread_step

from geojax.hlo import collective_traffic
from geojax.models import loss_sum
from geojax.models.moe import dispatch
from geojax.models.moe.capacity import drop
from geojax.models.moe.dispatch import most_to_a_rank, windows
from geojax.models.parallel.parallelism import SINGLE_DEVICE, Parallelism
from geojax.models.parallel.sequence_order import local_positions, position_order
from geojax.models.parallel.tensor import stream_positions
from geojax.planner.program_traffic import program_traffic
from geojax.planner.traffic.moe import predicted_expert_bytes
from geojax.runtime.platform import CPU, GPU


@pytest.mark.parametrize(
    ("mixture", "parallelism", "axes"),
    [("mixtral", Parallelism(expert=2), {"dc": 2}), ("capacity", Parallelism(expert=4), {})],
    ids=repr,
)
def test_windows_of_gpus_give_one_devices_loss_and_gradients(
    mixture, parallelism, axes, x64, packed_batch, monkeypatch
):
    """Windows of half of what even tokens need: some tokens wait for another exchange."""
    monkeypatch.setattr(dispatch, "target_platform", lambda: GPU)
    monkeypatch.setattr(dispatch, "_SLACK", 0.5)
    config = model_with(mixture)
    parameters = uneven_parameters(config)
    batch = packed_batch(config, rows=8, sequence=16)
    loss = jax.value_and_grad(lambda p: loss_sum(p, batch, config), has_aux=True)
    step = spread_step(config, parallelism, mesh_of(parallelism, **axes), remat="selective")
    got = jax.jit(step)(*spread(parameters, batch, config, parallelism))
    assert_close(got, jax.jit(loss)(parameters))


@pytest.mark.parametrize(("tensor", "context"), [(3, 2), (2, 4), (1, 4)])
@pytest.mark.parametrize("method", ["ring", "ulysses"])
def test_who_is_dropped_does_not_depend_on_who_holds_the_columns(tensor, context, method):
    # With three ranks of tensor the middle one has a part of each of its context rank's chunks.
    config = moe_model(num_experts=4, num_experts_per_tok=2, capacity_factor=0.6)
    sequence = 48
    random = np.random.default_rng(2)
    draws = [random.permutation(4)[:2] for _ in range(2 * sequence)]
    experts = jnp.asarray(draws, jnp.int32).reshape(2, sequence, 2)
    want = drop(experts, jnp.arange(sequence, dtype=jnp.int32), config, SINGLE_DEVICE)
    assert 10 < (want == 4).sum() < 100
    parallelism = Parallelism(
        tensor=tensor, sequence=tensor > 1, context=context, context_method=method
    )

    def local(experts):
        columns = local_positions(sequence // context, parallelism)
        return drop(experts, stream_positions(columns, parallelism, dim=0), config, parallelism)

    spec = PartitionSpec(None, ("context", "tensor"))
    program = jax.shard_map(local, mesh=mesh_of(parallelism), in_specs=spec, out_specs=spec)
    order = position_order(sequence, parallelism)
    np.testing.assert_array_equal(jax.jit(program)(experts[:, order]), want[:, order])


@pytest.mark.parametrize(
    ("mixture", "parallelism", "axes", "remat"),
    [
        ("mixtral", Parallelism(expert=4), {"dc": 2}, "none"),
        ("fine", Parallelism(expert=2, tensor=2), {"dc": 2}, "full"),
        ("capacity", Parallelism(expert=2, tensor=2, sequence=True), {"dc": 2}, "selective"),
        ("capacity", Parallelism(context=2, tensor=2, sequence=True), {"data": 2}, "full"),
        ("capacity", Parallelism(context=2, expert=4), {}, "none"),
        ("fine", Parallelism(tensor=2), {"data": 2}, "none"),
    ],
    ids=repr,
)
def test_bytes_of_the_windows_are_the_formula(mixture, parallelism, axes, remat, monkeypatch):
    monkeypatch.setattr(dispatch, "target_platform", lambda: GPU)
    config = model_with(mixture)
    mesh = mesh_of(parallelism, **axes)
    rows, columns = 2 * mesh.size // (parallelism.context * parallelism.tensor), 16
    inputs = block_inputs(config, rows, columns, jnp.bfloat16)
    traced = spread_blocks(config, parallelism, mesh, remat).trace(*inputs)
    counted = program_traffic(traced, mesh)
    assert counted.by_axes == collective_traffic(traced.lower(), mesh).by_axes
    assert not counted.over("dc")
    assert not counted.over("data")
    # What may have to be sent besides, if the tokens want it, is in branches.
    always = [each for each in counted.collectives if not each.conditional]
    sent = sum(each.bytes_sent for each in always if each.axes == ("expert",))
    of_layer = predicted_expert_bytes(
        config,
        parallelism,
        sequences=2,
        positions=columns // parallelism.context,
        dtype=jnp.bfloat16,
        remat=remat,
        platform=GPU,
    )
    agreement = 8 if parallelism.tensor == 1 and len(always) < len(counted.collectives) else 0
    assert 0 <= sent - config.num_hidden_layers * of_layer <= config.num_hidden_layers * agreement


def test_windows_hold_the_most_there_can_be():
    config = model_with("mixtral")
    for tokens, ranks in itertools.product([1, 5, 64, 1000], [2, 4]):
        parallelism = Parallelism(expert=ranks)
        most = most_to_a_rank(tokens, 1, tokens, config, parallelism)
        assert most == tokens * min(2, 4 // ranks)
        first, further, exchanges = windows(tokens, most, config, parallelism, GPU)
        assert first + exchanges * further >= most
        assert first <= -(-5 * tokens * 2 // (4 * ranks))
        first, _, exchanges = windows(tokens, most, config, parallelism, CPU)
        assert (first, exchanges) == (most, 0)
    # An expert that takes what it gets when all are equally busy needs one dispatch.
    config, parallelism = model_with("capacity"), Parallelism(expert=4)
    most = most_to_a_rank(4096, 4, 1024, config, parallelism)
    assert most == 4 * 2 * 384
    assert windows(4096, most, config, parallelism, GPU).exchanges == 0
