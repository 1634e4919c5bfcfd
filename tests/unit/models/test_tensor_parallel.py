"""Tensor and sequence parallelism: the same numbers, and no byte that the formula does not name."""

import collections

import jax
import jax.numpy as jnp
import pytest
from jax.extend.core import jaxprs_in_params
from model_families import FAMILIES
from spread_model import mesh_of, spread, spread_step

from geojax.hlo import collective_traffic
from geojax.models.parallel.parallelism import Parallelism
from geojax.planner.traffic.tensor import predicted_tensor_bytes

_KEY = jax.random.PRNGKey(7)


def _wide(family):
    """Eight heads, so that eight ranks can share them; with dropout."""
    return FAMILIES[family].replace(num_attention_heads=8, dropout=0.1)


@pytest.mark.parametrize("remat", ["none", "selective", "full"])
@pytest.mark.parametrize("sequence", [False, True], ids=["whole", "sequence"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_bytes_over_tensor_are_the_formulas(
    dtype, sequence, remat, random_parameters, packed_batch
):
    config, parallelism = _wide("gpt3"), Parallelism(tensor=4, sequence=sequence)
    traffic = _traffic(config, parallelism, remat, random_parameters(config, dtype), packed_batch)
    expected = predicted_tensor_bytes(
        config, parallelism, sequences=2, positions=16, dtype=dtype, remat=remat
    )
    # What sums gradients crosses data too.
    found = [each for each in traffic.collectives if each.axes == ("tensor",)]
    assert sum(each.bytes_sent for each in found) == expected


@pytest.mark.parametrize(
    ("sequence", "kinds"),
    [(False, {"all-reduce": 4}), (True, {"all-gather": 4, "reduce-scatter": 4})],
    ids=["whole", "sequence"],
)
def test_a_layer_enters_and_leaves_twice(sequence, kinds, random_parameters, packed_batch):
    config, parallelism = _wide("llama"), Parallelism(tensor=4, sequence=sequence)
    parameters = random_parameters(config, jnp.float32)
    traffic = _traffic(config, parallelism, "none", parameters, packed_batch, compiled=True)
    layers = [each for each in traffic.collectives if each.executions == config.num_hidden_layers]
    assert all(each.axes == ("tensor",) for each in layers)
    assert collections.Counter(each.kind for each in layers) == kinds
    # In float32 the compiler sends what is written.
    expected = predicted_tensor_bytes(
        config, parallelism, sequences=2, positions=16, dtype=jnp.float32, remat="none"
    )
    found = [each for each in traffic.collectives if each.axes == ("tensor",)]
    assert sum(each.bytes_sent for each in found) == expected


def test_sharing_the_stream_sends_the_same_bytes():
    config = _wide("llama")
    whole, shared = (
        predicted_tensor_bytes(
            config,
            Parallelism(tensor=8, sequence=sequence),
            sequences=1,
            positions=64,
            dtype=jnp.float32,
        )
        for sequence in (False, True)
    )
    assert whole == shared > 0


def test_one_tensor_rank_sends_nothing(random_parameters, packed_batch):
    config = _wide("llama")
    parameters = random_parameters(config, jnp.float32)
    for sequence in (False, True):
        parallelism = Parallelism(sequence=sequence)
        traffic = _traffic(config, parallelism, "none", parameters, packed_batch)
        assert {each.axes for each in traffic.collectives} == {("data",)}
        assert (
            predicted_tensor_bytes(config, parallelism, sequences=2, positions=16, dtype="float32")
            == 0
        )


def _traffic(config, parallelism, remat, parameters, packed_batch, compiled=False):
    mesh = mesh_of(parallelism, data=2)
    batch = packed_batch(config, rows=4, sequence=16)
    step = spread_step(config, parallelism, mesh, _KEY, remat=remat)
    program = step.lower(*spread(parameters, batch, config, parallelism))
    return collective_traffic(program.compile() if compiled else program, mesh)


@pytest.mark.parametrize("remat", ["selective", "full"])
def test_with_a_shared_stream_a_layer_keeps_its_share_alone(remat, random_parameters, packed_batch):
    config = _wide("gpt3")
    parameters = random_parameters(config, jnp.float32)
    batch = packed_batch(config, rows=2, sequence=16)

    def kept(tensor):
        parallelism = Parallelism(tensor=tensor, sequence=True)
        step = spread_step(config, parallelism, mesh_of(parallelism), _KEY, remat=remat)
        program = jax.make_jaxpr(step)(*spread(parameters, batch, config, parallelism))
        forward = next(_scans(program.jaxpr, config.num_hidden_layers))
        body = next(iter(jaxprs_in_params(forward.params)))
        return sum(
            stacked.aval.size * stacked.aval.dtype.itemsize
            for stacked, one in zip(forward.outvars, body.outvars, strict=True)
            if stacked.aval.ndim > one.aval.ndim
        )

    assert 4 * kept(4) == kept(1) > 0


def _scans(jaxpr, length):
    for equation in jaxpr.eqns:
        if equation.primitive.name == "scan" and equation.params["length"] == length:
            yield equation
        for inner in jaxprs_in_params(equation.params):
            yield from _scans(inner, length)
