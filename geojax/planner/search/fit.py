"""The ZeRO stage, the remat and the early sums with which a layout fits into memory.

Each saves memory for time, so that of every way the cheapest that fits is kept and the dearer ones
behind it are not looked at: remat computes again, and a higher ZeRO stage sends more.
"""

import dataclasses
from collections import Counter
from collections.abc import Iterator
from typing import Literal, NamedTuple

from geojax.planner.cost.layout import Layout
from geojax.planner.cost.memory import LayoutMemory, layout_memory
from geojax.planner.search.request import PlanRequest


class Fitting(NamedTuple):
    """A layout that fits, and its memory."""

    layout: Layout
    memory: LayoutMemory


def fitting(request: PlanRequest, shape: Layout, refused: Counter[str]) -> Iterator[Fitting]:
    """Yield the layouts of a shape that fit into the memory of an accelerator.

    Args:
        request: what is asked for.
        shape: mesh, microbatches and schedule.
        refused: counts the layouts that do not fit.
    """
    least = len(request.remats)
    for sharded in shardings(shape):
        for number, remat in enumerate(request.remats):
            if number >= least:
                break  # a lower ZeRO stage fits with as little to compute again
            layout = dataclasses.replace(sharded, remat=remat)
            memory = memory_of(request, layout)
            if memory.bytes > request.usable_bytes:
                refused["memory"] += 1
                continue
            yield Fitting(layout, memory)
            if layout.overlap_grad_reduce is not True:
                least = number  # others may still gain by what they send early
            break


def memory_of(request: PlanRequest, layout: Layout) -> LayoutMemory:
    """Estimate the memory of a layout on the accelerators of a request."""
    return layout_memory(
        request.model,
        layout,
        sequence_length=request.sequence_length,
        device_bytes=request.accelerator.memory_bytes or request.usable_bytes,
        optimizer=request.optimizer,
    )


def shardings(shape: Layout) -> list[Layout]:
    """List the ways to shard the state of a shape, those that send least first."""
    early: tuple[bool | Literal["auto"], ...] = ("auto",)
    stages: tuple[Literal[0, 1, 2, 3], ...] = (1,)
    if shape.pipeline_stages == 1:
        stages = (1, 2, 3)
        if shape.dc > 1 and shape.dc_role == "data":
            early = (True, False)
    return [
        dataclasses.replace(shape, zero_stage=stage, overlap_grad_reduce=overlap)
        for stage in stages
        for overlap in early
    ]
