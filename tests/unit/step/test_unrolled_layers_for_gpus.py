"""Compiled ahead of time for an H100, unrolled layers leave nothing in stacks."""

from support.h100 import h100_devices, needs_cuda, small_llama
from support.plans import step_plan_on

from geojax.mesh import make_mesh
from geojax.optim import OptimizerSettings, learning_rate_schedule, make_optimizer
from geojax.planner.memory import CompiledMemory, step_memory
from geojax.precision import policy
from geojax.runtime.compilation import without_compilation_cache
from geojax.runtime.xla_flags import gpu_compiler_options
from geojax.step.program import batch_shape, lower_step
from geojax.step.state import state_layouts

LAYERS, ROWS, SEQUENCE = 4, 4, 4096


def compiled_step(scan_layers):
    """The step's program, and its memory as estimated over as compiled."""
    model = small_llama(LAYERS)
    mesh = make_mesh(devices=h100_devices(sites=1, hosts=1)[:1])
    plan = step_plan_on(mesh, policy("bf16"), scan_layers=scan_layers)
    settings = OptimizerSettings()
    optimizer, schedule = make_optimizer(settings, 10), learning_rate_schedule(settings, 10)
    layouts, batch = state_layouts(model, optimizer, plan), batch_shape(ROWS, SEQUENCE)
    lowered = lower_step(layouts, model, plan, optimizer, schedule, batch)
    with without_compilation_cache():
        program = lowered.compile(gpu_compiler_options() | (plan.compiler_options or {}))
    estimated = step_memory(model, plan, layouts, batch)
    compiled = CompiledMemory.of(program).bytes
    return program, compiled, (estimated.bytes - estimated.attention) / compiled


@needs_cuda
def test_nothing_is_kept_in_stacks_and_the_memory_is_as_estimated():
    looped, of_loops, _ = compiled_step(scan_layers=True)
    unrolled, of_unrolled, ratio = compiled_step(scan_layers=False)
    stack = f"bf16[{LAYERS},{ROWS},{SEQUENCE},"
    assert stack in looped.as_text()
    assert stack not in unrolled.as_text()
    assert of_unrolled < of_loops
    assert 0.9 < ratio < 1.1
