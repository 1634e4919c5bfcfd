"""A traced layer of geojax's parts, as a model of your own has it, is that of the formulas."""

import jax.numpy as jnp
import pytest
from support.own_models import parts_config

from geojax.models import OwnModel
from geojax.models.parallel.parallelism import Parallelism
from geojax.planner.cost.own_layer import own_layer
from geojax.planner.traffic.moe import predicted_expert_bytes
from geojax.planner.traffic.tensor import predicted_tensor_bytes
from geojax.runtime.platform import CPU

LENGTH, SEQUENCES = 16, 2


def _traced(parallelism, remat, **arguments):
    model = OwnModel(module="support.own_models:build_of_parts", vocab_size=29, **arguments)
    dtype = jnp.dtype(jnp.float32)
    return own_layer(model, parallelism, SEQUENCES, LENGTH, remat, dtype, split=False)


@pytest.mark.parametrize("remat", ["none", "selective", "full"])
@pytest.mark.parametrize("sequence", [False, True])
def test_bytes_over_tensor_are_those_of_the_formula(remat, sequence):
    parallelism = Parallelism(tensor=2, sequence=sequence)
    made = _traced(parallelism, remat, layers=4).messages["tensor",]

    def of_layers(count):
        return predicted_tensor_bytes(
            parts_config(29, layers=count),
            parallelism,
            sequences=SEQUENCES,
            positions=LENGTH,
            dtype="float32",
            remat=remat,
        )

    assert made.forward_bytes + made.backward_bytes == of_layers(2) - of_layers(1)


def test_bytes_over_expert_are_those_of_the_formula():
    parallelism = Parallelism(expert=2)
    made = _traced(parallelism, "none", layers=4, experts=4).messages["expert",]
    assert made.forward_bytes + made.backward_bytes == predicted_expert_bytes(
        parts_config(29, layers=4, experts=4),
        parallelism,
        sequences=SEQUENCES,
        positions=LENGTH,
        dtype="float32",
        remat="none",
        platform=CPU,
    )


def test_ranks_share_the_products():
    arguments = {"layers": 4, "experts": 4, "keys": 2}
    alone, shared = (
        sum(each.times * each.rows * each.columns * each.inner for each in made.products)
        for made in (
            _traced(Parallelism(), "none", **arguments),
            _traced(Parallelism(tensor=2, expert=2, sequence=True), "none", **arguments),
        )
    )
    assert shared == pytest.approx(alone / 2, rel=0.05)  # all but those of the router
