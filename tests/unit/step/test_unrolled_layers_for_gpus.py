"""Compiled ahead of time for an H100, unrolled layers leave nothing in stacks."""

from support.h100 import compiled_step, h100_devices, needs_cuda, small_llama
from support.plans import step_plan_on

from geojax.mesh import make_mesh
from geojax.planner.memory import CompiledMemory, step_memory
from geojax.precision import policy
from geojax.step.program import batch_shape

LAYERS, ROWS, SEQUENCE = 4, 4, 4096


def step_of(scan_layers):
    """The step's program, and its memory as estimated over as compiled."""
    model = small_llama(LAYERS)
    mesh = make_mesh(devices=h100_devices(sites=1, hosts=1)[:1])
    plan, batch = (
        step_plan_on(mesh, policy("bf16"), scan_layers=scan_layers),
        batch_shape(ROWS, SEQUENCE),
    )
    program, layouts = compiled_step(model, plan, batch)
    estimated = step_memory(model, plan, layouts, batch)
    compiled = CompiledMemory.of(program).bytes
    return program, compiled, (estimated.bytes - estimated.attention) / compiled


@needs_cuda
def test_nothing_is_kept_in_stacks_and_the_memory_is_as_estimated():
    looped, of_loops, _ = step_of(scan_layers=True)
    unrolled, of_unrolled, ratio = step_of(scan_layers=False)
    stack = f"bf16[{LAYERS},{ROWS},{SEQUENCE},"
    assert stack in looped.as_text()
    assert stack not in unrolled.as_text()
    assert of_unrolled < of_loops
    assert 0.9 < ratio < 1.1
