"""Compiled ahead of time for H100s, a layer's gradients are added to their sums in one pass."""

import itertools

from support.h100 import compiled_step, h100_devices, needs_cuda, small_llama
from support.plans import step_plan_on

from geojax.hlo.module import parse_module
from geojax.mesh import make_mesh
from geojax.precision import policy
from geojax.step.program import batch_shape

LAYERS, MICROBATCHES, SEQUENCE = 4, 2, 1024


@needs_cuda
def test_no_layer_of_a_sum_is_copied_to_be_added_to():
    mesh = make_mesh(devices=h100_devices(sites=1, hosts=1)[:1])
    plan = step_plan_on(mesh, policy("bf16"), MICROBATCHES)
    batch = batch_shape(MICROBATCHES, SEQUENCE)
    program, _ = compiled_step(small_llama(LAYERS), plan, batch)
    computations = parse_module(program.as_text()).computations.values()
    made = [
        each.shape
        for each in itertools.chain.from_iterable(computations)
        if each.opcode.startswith("fusion")
    ]
    for kernel in ("1024,4096]", "4096,1024]"):
        assert any(f"f32[{LAYERS},{kernel}" in shape for shape in made), "the sums"
        assert not any(f"f32[1,{kernel}" in shape for shape in made), "a layer of them"
