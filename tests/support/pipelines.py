"""Pipelines to compare with one device: any schedule, through sites or in each, in any company."""

import dataclasses
import functools
import itertools
import math
import random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from support.equality import Result, gradients_of_step
from support.plans import step_plan_on
from support.small_models import FAMILIES, make_batch

from geojax import make_mesh
from geojax.models import ModelConfig
from geojax.models.parameters import parameter_shapes
from geojax.pipeline import SCHEDULES, Placement, tick_table
from geojax.pipeline.execution.tick_program import TickProgram
from geojax.precision import policy
from geojax.step.gradients import step_gradients
from geojax.step.plan import StepPlan
from geojax.step.program import batch_shape, batch_specs
from geojax.step.stage_layers import StagedLayers
from geojax.step.state import parameter_layouts

DEVICES, ROWS, SEQUENCE, MICROBATCHES = 8, 24, 16, 6
QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
"""Each program runs once: what is spent on its machine code is lost. (XLA's passes stay.)"""

_SIZES = {
    "hidden_size": 16,
    "num_attention_heads": 4,
    "head_dim": 4,
    "intermediate_size": 20,
    "vocab_size": 29,
    "max_position_embeddings": SEQUENCE,
}
_MIXTURE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_bias": True}
_WINDOWS = {
    "sliding_window": 5,
    "layer_types": ("sliding_attention", "full_attention"),
    "use_attention_sinks": True,
}


@dataclasses.dataclass(frozen=True)
class Case:
    """A pipeline; `str` is its name."""

    schedule: str
    sites: str = "2 sites"
    """"2 sites", "3 sites": a pipeline through them; "in each": one in each of two sites (one site
    where there are not enough devices)."""
    hop_ticks: int = 1
    """At the cut between sites (of two cuts the other one takes four less this); with a pipeline in
    each site between its stages."""
    tensor: str = ""
    context: str = ""
    rows: str = ""
    """What shares the rows of a microbatch: "", "data" or "expert" (a mixture)."""
    remat: str = "none"
    branches: str = ""
    family: str = "llama"
    """gpt3 has dropout and a tied head."""
    layers: str = ""
    """"uneven": chunks of unequal numbers of layers with sinks, of which some have a window."""
    overlap: bool = False
    """A chunk's gradients are reduced while other chunks go backwards."""

    def __str__(self) -> str:
        words = [self.schedule, self.sites, f"hop {self.hop_ticks}", self.tensor, self.context]
        words += [self.rows, "" if self.remat == "none" else f"remat {self.remat}", self.branches]
        words += [self.family, self.layers, "overlap" if self.overlap else ""]
        return "-".join(word.replace(" ", "_") for word in words if word)

    @property
    def missing(self) -> str | None:
        """Why there is no such pipeline; None if there is."""
        if self.axes is None:
            return f"more than {DEVICES} devices"
        if SCHEDULES[self.schedule].split_backward and not self.branches:
            return "split backwards take branches"
        if self.branches and self.schedule == "branch_free":
            return "with branches it is geopipe"
        return None

    @property
    def axes(self) -> dict[str, int] | None:
        """The mesh, with as many sites and stages as there are devices for."""
        inside = {
            "data": 2 if self.rows == "data" else 1,
            "expert": 2 if self.rows == "expert" else 1,
            "context": 2 if self.context else 1,
            "tensor": 2 if self.tensor else 1,
        }
        sites = [(int(self.sites[0]), 2), (int(self.sites[0]), 1)] if self.through_sites else []
        for dc, stage in sites or [(2, 2), (1, 2)]:
            if dc * stage * math.prod(inside.values()) <= DEVICES:
                return {"dc": dc, "stage": stage} | inside
        return None

    @property
    def through_sites(self) -> bool:
        return self.sites != "in each"

    @property
    def placement(self) -> Placement:
        assert self.axes is not None, self.missing
        dc, stage = self.axes["dc"], self.axes["stage"]
        stages = [stage] * dc if self.through_sites else [stage]
        if self.schedule == "zbv":
            return Placement.vee(sum(stages))
        return Placement.interleaved(stages, 2 if self.schedule == "interleaved" else 1)

    @property
    def hops(self) -> list[int]:
        """The ticks between each chunk and its successor."""
        assert self.axes is not None, self.missing
        hops, cuts = [], itertools.cycle([self.hop_ticks, 4 - self.hop_ticks])
        for before, behind in itertools.pairwise(self.placement.stage_of):
            if not self.through_sites:
                hops.append(self.hop_ticks if before != behind else 1)
            elif before // self.axes["stage"] != behind // self.axes["stage"]:
                hops.append(next(cuts))
            else:
                hops.append(1)
        return hops

    @property
    def layers_per_chunk(self) -> tuple[int, ...]:
        chunks = self.placement.chunks
        if not self.layers:
            return (max(1, (6 if chunks % 3 == 0 else 8) // chunks),) * chunks
        layers = max(9, chunks + 3)
        cuts = sorted(random.Random(0).sample(range(1, layers), chunks - 1))
        return tuple(end - start for start, end in itertools.pairwise([0, *cuts, layers]))

    @property
    def context_method(self) -> str:
        """A ring's messages on CPUs wait for all devices: those that work and those that do not."""
        if not self.branches and not self.layers:
            return "ring"
        return "all_gather" if self.family == "llama" else "ulysses"

    @property
    def limit(self) -> int | None:
        """Of latency_hiding: less than 1F1B takes."""
        if self.schedule.startswith("latency_hiding"):
            return max(2, self.placement.stages - 1)
        return None

    def program(self, microbatches: int = MICROBATCHES) -> TickProgram:
        table = tick_table(self.schedule, self.placement, microbatches, self.hops, self.limit)
        return TickProgram.of(table, branch_free=not self.branches)

    def plan(self, precision: str, microbatches: int = MICROBATCHES) -> StepPlan:
        assert self.axes is not None, self.missing
        devices = jax.devices()[: math.prod(self.axes.values())]
        return step_plan_on(
            make_mesh(devices=devices, **self.axes),
            policy(precision),
            microbatches,
            remat=self.remat,
            sequence_parallel=self.tensor == "sequence",
            context_method=self.context_method,
            overlap_grad_reduce=self.overlap,
            dc_role="stage" if self.through_sites else "data",
            staged_layers=StagedLayers(self.placement, self.layers_per_chunk),
            tick_program=self.program(microbatches),
        )

    @property
    def model(self) -> ModelConfig:
        mixture = _MIXTURE if self.rows == "expert" else {}
        parts = FAMILIES[self.family] | mixture | (_WINDOWS if self.layers else {})
        layers = sum(self.layers_per_chunk)
        return ModelConfig(num_hidden_layers=layers, **_SIZES, **parts)

    def gradients(self) -> Result:
        """Loss and gradients of a step in fp32."""
        return gradients_of_step(self.model, *_setting(self.model), self.plan("fp32"), QUICK)


@functools.cache
def _setting(model: ModelConfig) -> tuple[Any, Any, Any]:
    generator = np.random.default_rng(1)

    def initial(path: Any, shape: Any) -> jax.Array:  # biases and all: nothing is zero
        around = 1.0 if "scale" in jax.tree_util.keystr(path) else 0.0
        values = around + 0.3 * generator.standard_normal(shape.shape)
        return jnp.asarray(values.astype(np.float32))

    parameters = jax.tree_util.tree_map_with_path(initial, parameter_shapes(model))
    batch = make_batch(model, rows=ROWS, sequence=SEQUENCE)
    return parameters, batch, jax.random.key(7) if model.dropout else None


def trace_gradients(
    case: Case, microbatches: int = MICROBATCHES, rows: int = 2
) -> tuple[StepPlan, jax.stages.Traced]:
    """The gradients of a step in fp32, `rows` of a microbatch on each device, to be looked at."""
    plan, model = case.plan("fp32", microbatches), case.model
    layouts = parameter_layouts(model, plan)
    specs = jax.tree.map(lambda place: place.spec(), layouts)
    shares = math.prod(plan.mesh.shape[axis] for axis in plan.batch_axes)
    batch = batch_shape(rows * microbatches * shares, SEQUENCE)
    gradients = functools.partial(
        step_gradients, layouts=layouts, model=model, plan=plan, dropout_key=None
    )
    program = jax.shard_map(
        lambda shards, batch: gradients(shards, batch).gradients,
        mesh=plan.mesh,
        in_specs=(specs, batch_specs(batch, plan)),
        out_specs=specs,
    )
    shards = jax.tree.map(
        lambda place: jax.ShapeDtypeStruct(place.padded_shape, jnp.float32), layouts
    )
    return plan, jax.jit(program).trace(shards, batch)
