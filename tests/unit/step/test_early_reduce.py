"""Parts of a pipeline's gradients that leave early: a chunk each, or several chunks together."""

import jax
import numpy as np
import pytest
from support.equality import gradients_of_step
from support.plans import step_plan_on
from support.small_models import drawn_parameters, make_batch, model_of

from geojax import make_mesh
from geojax.pipeline import Placement, tick_table
from geojax.pipeline.execution.tick_program import TickProgram
from geojax.planner.traffic.gradients import gradient_messages
from geojax.precision import policy
from geojax.step.early_reduce import early_parts, pieces
from geojax.step.stage_layers import StagedLayers
from geojax.step.state import parameter_layouts

STAGES, CHUNKS, MICROBATCHES = 2, 4, 4
MODEL = model_of("llama").model_copy(
    update={"num_hidden_layers": STAGES * CHUNKS, "tie_word_embeddings": False}
)


def plan_of(together, layers_per_chunk=1):
    placement = Placement.interleaved([STAGES], CHUNKS)
    table = tick_table("interleaved", placement, MICROBATCHES, [1] * (placement.chunks - 1))
    return step_plan_on(
        make_mesh(devices=jax.devices()[:4], dc=2, stage=STAGES),
        policy("fp32"),
        MICROBATCHES,
        overlap_grad_reduce=True,
        bucket_layers=together,
        bucket_bytes=2**30,
        staged_layers=StagedLayers(placement, (layers_per_chunk,) * placement.chunks),
        tick_program=TickProgram.of(table, branch_free=False),
    )


@pytest.mark.parametrize(
    ("together", "parts"),
    [
        (1, {"head": 7, 3: 6, 2: 4, 1: 2}),
        (2, {"head": 7, 2: 4}),
        (3, {"head": 7, 3: 6}),
        (4, {"head": 7}),
        (8, {"head": 7}),
    ],
)
def test_chunks_that_leave_together_do_so_when_the_first_is_whole(together, parts):
    plan = plan_of(together)
    layouts = parameter_layouts(MODEL, plan)
    end = plan.tick_program.ticks.ticks - 1
    found = early_parts(layouts, plan)
    assert {part: end - tick for part, tick in found.items()} == parts
    assert list(found.values()) == sorted(found.values())

    by_part = pieces(layouts, plan)
    assert list(by_part) == [*parts, "rest"]
    of_all = [piece for part in by_part.values() for piece in part]
    assert len(of_all) == len(set(of_all)), "each piece must be in one part"
    assert set(of_all) == {piece for part in pieces(layouts, plan_of(1)).values() for piece in part}
    for part in set(parts) - {"head"}:
        assert {chunk for _, chunk in by_part[part]} == {*range(part, min(part + together, CHUNKS))}


def test_fewer_layers_than_a_chunk_has_are_a_chunk():
    model = MODEL.model_copy(update={"num_hidden_layers": 2 * STAGES * CHUNKS})
    layouts = parameter_layouts(model, plan_of(1, layers_per_chunk=2))
    for layers, parts in {1: 4, 2: 4, 3: 4, 4: 2}.items():
        assert len(early_parts(layouts, plan_of(layers, layers_per_chunk=2))) == parts


def test_the_messages_of_several_chunks_carry_the_bytes_of_each():
    def messages(together):
        plan = plan_of(together)
        return gradient_messages(MODEL, parameter_layouts(MODEL, plan), plan)

    alone, pairs = messages(1), messages(2)
    head, *chunks = alone.early
    assert pairs.early[0].bytes == head.bytes
    assert pairs.early[1].bytes == sum(chunk.bytes for chunk in chunks[:2])
    assert [part.ticks for part in pairs.early] == [3, 4]
    assert pairs.bytes == alone.bytes


def test_gradients_are_the_same_bits_however_many_chunks_leave_together():
    parameters, batch = drawn_parameters(MODEL), make_batch(MODEL, rows=2 * MICROBATCHES)
    alone, pairs = (
        gradients_of_step(MODEL, parameters, batch, None, plan_of(together)) for together in (1, 2)
    )
    assert any(np.any(leaf) for leaf in jax.tree.leaves(alone.gradients))
    jax.tree.map(np.testing.assert_array_equal, pairs, alone)
