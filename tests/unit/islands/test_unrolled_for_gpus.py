"""Compiled ahead of time for an H100, the unrolled passes of an island leave nothing in stacks."""

import re

from support.h100 import h100_devices, needs_cuda, small_llama
from support.plans import step_plan_on

from geojax.islands.programs.site_part import SitePart, even_chunks
from geojax.islands.programs.site_programs import SitePrograms
from geojax.islands.site_state import site_layouts
from geojax.mesh import make_mesh
from geojax.optim import OptimizerSettings, learning_rate_schedule, make_optimizer
from geojax.planner.memory import CompiledMemory
from geojax.precision import policy
from geojax.runtime.compilation import without_compilation_cache
from geojax.step.program import batch_shape

LAYERS, ROWS, SEQUENCE = 2, 2, 4096


def compiled_backward(scan_layers):
    """The backward of a site's only chunk for one of two microbatches."""
    model = small_llama(LAYERS)
    mesh = make_mesh(devices=h100_devices(sites=1, hosts=1)[:1])
    plan = step_plan_on(mesh, policy("bf16"), islands=2, microbatches=2, scan_layers=scan_layers)
    settings, part = OptimizerSettings(), SitePart(model, even_chunks(model, 1))
    optimizer, schedule = make_optimizer(settings, 10), learning_rate_schedule(settings, 10)
    layouts, batch = site_layouts(part, optimizer, plan), batch_shape(ROWS, SEQUENCE)
    programs = SitePrograms(part, plan, layouts, optimizer, schedule, batch)
    with without_compilation_cache():
        _, backward = programs.compiled_passes(0)
    return backward


@needs_cuda
def test_nothing_is_kept_in_stacks_and_the_sums_are_added_to_in_place():
    looped, unrolled = compiled_backward(scan_layers=True), compiled_backward(scan_layers=False)
    stacked_residual = f"bf16[1,{LAYERS},1,{SEQUENCE},"
    assert stacked_residual in looped.as_text()
    assert stacked_residual not in unrolled.as_text()
    assert not re.search(rf"= f32\[(1,)?{LAYERS},1024,4096\]\S* copy\(", unrolled.as_text())
    assert CompiledMemory.of(unrolled).bytes < CompiledMemory.of(looped).bytes
