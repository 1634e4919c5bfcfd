"""Messages between sites have each distinct number once, however many ranks of a site share it."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from support.islands import SETTINGS, site_plans

from geojax import make_mesh
from geojax.collectives import BFLOAT16
from geojax.islands.actions import Message
from geojax.islands.programs.per_rank import RANKS, pack, unpack
from geojax.islands.programs.shared import divide, whole
from geojax.islands.programs.site_part import SitePart, even_chunks
from geojax.islands.programs.site_programs import SitePrograms
from geojax.islands.site_state import site_layouts
from geojax.models import ModelConfig, parameter_count
from geojax.models.parameters import parameter_shapes
from geojax.optim import learning_rate_schedule, make_optimizer
from geojax.precision import policy
from geojax.step.program import batch_shape

# Every size divides by the ranks of a site, so that nothing is padded.
MODEL = ModelConfig(
    num_hidden_layers=2,
    hidden_size=16,
    num_attention_heads=2,
    head_dim=8,
    intermediate_size=32,
    vocab_size=64,
    max_position_embeddings=32,
    tie_word_embeddings=False,
)
CASES = {
    "ZeRO 0": ({"data": 2}, {"zero_stage": 0}, 4),
    "ZeRO 3": ({"data": 2, "tensor": 2}, {"zero_stage": 3}, 4),
    "context": ({"data": 2, "context": 2}, {"zero_stage": 2}, 4),
    "tensor": ({"data": 2, "tensor": 2}, {}, 4),
    "bfloat16": ({"data": 2, "tensor": 2}, {"wire_format": BFLOAT16}, 2),
}


def message_bytes(programs, message):
    leaves = jax.tree.leaves(programs.payload(message))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)


def programs_of(axes, options, goes_on=False):
    plan, _ = site_plans(2, axes, policy("fp32"), **options)
    plan = dataclasses.replace(plan, goes_on=goes_on)
    part = SitePart(MODEL, even_chunks(MODEL, 2))
    optimizer, schedule = make_optimizer(SETTINGS, 10), learning_rate_schedule(SETTINGS, 10)
    layouts = site_layouts(part, optimizer, plan)
    return SitePrograms(part, plan, layouts, optimizer, schedule, batch_shape(4, 32))


def test_a_site_that_goes_on_without_others_keeps_the_sums_of_a_step():
    axes, options = {"data": 2}, {"zero_stage": 2}
    ends, goes_on = (programs_of(axes, options, each).step_bytes for each in (False, True))
    shard_bytes = 4 * parameter_count(MODEL) // 2
    assert goes_on.messages - ends.messages == pytest.approx(shard_bytes, rel=0.01)
    assert goes_on._replace(messages=ends.messages) == ends


@pytest.mark.parametrize("case", CASES)
def test_a_site_sends_each_gradient_once(case):
    axes, options, width = CASES[case]
    programs = programs_of(axes, options)
    sent = sum(message_bytes(programs, Message("bucket", chunk=chunk)) for chunk in (0, 1))
    assert sent == width * parameter_count(MODEL)
    # Loss, targets and two requests.
    assert message_bytes(programs, Message("scalars")) == 4 * 4
    # Four sequences of 32 tokens.
    assert message_bytes(programs, Message("activation")) == 4 * 4 * 32 * MODEL.hidden_size


def test_what_no_ranks_share_crosses_as_it_is():
    alone, shared = (programs_of(axes, {}) for axes in ({"data": 2}, {"data": 2, "tensor": 2}))
    for programs in (alone, shared):
        hop = jax.tree.map(
            lambda leaf: jax.device_put(
                jnp.arange(float(leaf.size)).reshape(leaf.shape), leaf.sharding
            ),
            programs.payload(Message("activation")),
        )
        stream = programs.whole(hop)
        again = programs.divide(stream)
        assert (stream is hop) == (again is stream) == (programs is alone)
        assert jax.tree.structure(again) == jax.tree.structure(hop)
        jax.tree.map(np.testing.assert_array_equal, again, hop)


def test_between_passes_zero_3_holds_shards_of_layers():
    layers = sum(leaf.size for leaf in jax.tree.leaves(parameter_shapes(MODEL)["layers"]))
    others = parameter_count(MODEL) - layers
    zero_2, zero_3, kept = (
        programs_of({"data": 2}, options).step_bytes
        for options in (
            {"zero_stage": 2},
            {"zero_stage": 3},
            {"zero_stage": 3, "reshard_after_forward": False},
        )
    )
    assert zero_2.weights == kept.weights == 4 * (others + layers)
    assert zero_3.weights == 4 * (others + layers // 2)
    # The gathered weights of the layer that is computed and of the next one.
    assert zero_3.of_pass == 4 * layers
    assert zero_2.of_pass == kept.of_pass == 0


def test_whole_inverts_divide():
    mesh = make_mesh(devices=jax.devices()[:4], data=2, tensor=2)
    drawn = jnp.arange(30.0).reshape(2, 3, 5)

    def parts(value):
        return pack(divide({"of data": value, "everywhere": jnp.arange(7.0)}))

    def joined(packed):
        return whole(unpack(packed))

    divided = jax.jit(
        jax.shard_map(parts, mesh=mesh, in_specs=PartitionSpec("data"), out_specs=RANKS)
    )(drawn)
    assert divided["of data"].numbers.array.shape == (4, 8)  # 15 numbers of two ranks
    assert divided["everywhere"].numbers.array.shape == (4, 2)
    specs = {"of data": PartitionSpec("data"), "everywhere": PartitionSpec()}
    again = jax.jit(jax.shard_map(joined, mesh=mesh, in_specs=RANKS, out_specs=specs))(divided)
    np.testing.assert_array_equal(again["of data"], drawn)
    np.testing.assert_array_equal(again["everywhere"], np.arange(7.0))
