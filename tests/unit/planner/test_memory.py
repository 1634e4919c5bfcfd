"""The table of `geojax plan` against XLA's own account of the compiled step."""

import dataclasses
import functools
import math
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from geojax.config.run_config import RunConfig
from geojax.mesh import make_mesh
from geojax.models import parameter_count, parameter_shapes
from geojax.planner.memory import STATE_USES, CompiledMemory
from geojax.planner.memory_phases import PHASES, USES
from geojax.planner.resolve.traced_run import trace_on, trace_run
from geojax.sharding import LeafLayout, bytes_per_device
from geojax.step.state import TrainState

QUICKSTART = Path(__file__).parents[3] / "configs" / "quickstart.yaml"
TINY = ("--model", "tiny", "--batch.sequence_length", "256")
SITE = ("--mesh.dc", "2", "--mesh.data", "2")
EXPERTS = ("--model.num_experts", "4", "--model.num_experts_per_tok", "2")
LATENTS = (
    *(
        "--model.num_key_value_heads",
        "4",
        "--model.q_lora_rank",
        "48",
        "--model.kv_lora_rank",
        "32",
        "--model.v_head_dim",
        "24",
    ),
    *("--model.qk_nope_head_dim", "32", "--model.qk_rope_head_dim", "16"),
)
BALANCED = (
    *("--model.first_k_dense_replace", "1", "--model.use_router_bias", "true"),
    *("--model.scoring_func", "sigmoid", "--model.n_shared_experts", "1"),
)

PIPELINED = (
    *("--mesh", "{dc: 2, stage: 2, data: 2}", "--dc.role", "stage"),
    *("--pipeline.hop_ticks", "2", "--batch.microbatches", "4"),
)

LAYOUTS = {
    "quickstart": (),
    "everything again": ("--remat", "full"),
    "two microbatches": ("--batch.global_batch_size", "16", "--batch.microbatches", "2"),
    "overlap": ("--communication.overlap_grad_reduce", "true"),
    "tensor": (*SITE, "--mesh.tensor", "2", "--parallelism.sequence", "true"),
    "context": (*SITE, "--mesh.context", "2", "--batch.sequence_length", "512"),
    "windows": (
        *("--model.sliding_window", "64", "--model.use_attention_sinks", "true"),
        *("--model.layer_types", "[sliding_attention, full_attention]"),
    ),
    "experts": (
        *(*SITE, "--mesh.expert", "2", *EXPERTS),
        *("--model.moe_bias", "true", "--model.swiglu_limit", "7"),
    ),
    "latents": (*SITE, "--mesh.tensor", "2", *LATENTS),
    "latents and balanced experts": (*SITE, "--mesh.expert", "2", *EXPERTS, *LATENTS, *BALANCED),
}

# Many parameters and few tokens: what ZeRO shards is most of what is held, in the backward pass.
LARGE = (
    "--model.num_hidden_layers",
    "16",
    "--model.vocab_size",
    "512",
    "--batch.sequence_length",
    "192",
)


@functools.cache
def config_of(*overrides):
    return RunConfig.load(QUICKSTART, (*TINY, *overrides))


@functools.cache
def compiled(*overrides):
    config = config_of(*overrides)
    step = trace_on(config, make_mesh(**config.mesh.model_dump()))
    return CompiledMemory.of(step.program.lower().compile(step.plan.compiler_options))


@functools.cache
def stage(number):
    return (*LARGE, "--zero.stage", str(number))


def test_phases_and_uses_are_those_of_a_table():
    fields = {field.name for field in dataclasses.fields(TrainState)}
    assert set(STATE_USES) <= fields
    assert set(STATE_USES.values()) <= set(USES)
    for layout in ((), PIPELINED):
        phases = trace_run(config_of(*layout)).memory.phases
        assert tuple(phases) == PHASES
        assert set().union(*phases.values()) <= set(USES)


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_estimate_is_within_a_tenth_of_what_xla_says(name):
    estimate = trace_run(config_of(*LAYOUTS[name])).memory
    assert estimate.bytes == pytest.approx(compiled(*LAYOUTS[name]).bytes, rel=0.1)


@pytest.mark.parametrize("number", range(4))
def test_so_it_is_for_every_stage_of_zero(number):
    step = trace_run(config_of(*stage(number)))
    measured = compiled(*stage(number))
    assert step.memory.bytes == pytest.approx(measured.bytes, rel=0.1)
    batch = 192 * 5 * 4 + 2 * 4  # a row and the signals; only dropout reads its number and the seed
    assert measured.arguments == bytes_per_device(step.layouts) + batch


def size(shape):
    return math.prod(shape) * 4


def held_by_formula(number, layouts):
    """State, gathered weights and gradients of a device, in float32, during the backward pass."""
    layers = [leaf.of_layer() for leaf in jax.tree.leaves(layouts["layers"])]
    outer = jax.tree.leaves({name: tree for name, tree in layouts.items() if name != "layers"})
    count = jax.tree.leaves(layouts["layers"])[0].shape[0]

    def sums(shape):
        return [sum(size(getattr(leaf, shape)) for leaf in leaves) for leaves in (outer, layers)]

    (outer_whole, layer_whole), (outer_shard, layer_shard) = (
        sums("model_shard_shape"),
        sums("shard_shape"),
    )
    whole = outer_whole + count * layer_whole
    state = 3 * (outer_shard + count * layer_shard)
    if number == 0:
        return state + whole  # it computes with the master weights
    if number == 1:
        return state + whole + whole
    pending = layer_whole  # of the layer before, on its way
    gradients = outer_whole + count * layer_shard + pending
    # Stage 3: the weights of this layer and of the next one.
    return state + gradients + (whole if number == 2 else outer_whole + 2 * layer_whole)


def test_the_peak_falls_with_the_stage_as_the_formula_says():
    totals = [compiled(*stage(number)).bytes for number in range(4)]
    assert totals == sorted(totals, reverse=True)
    formula = [
        held_by_formula(number, trace_run(config_of(*stage(number))).layouts.parameters)
        for number in range(4)
    ]
    for lower, higher in ((0, 1), (1, 2), (2, 3)):
        fallen = totals[lower] - totals[higher]
        expected = formula[lower] - formula[higher]
        assert fallen == pytest.approx(expected, abs=0.05 * totals[0])


def test_eighteen_bytes_a_parameter_without_zero_in_mixed_precision():
    """bf16 weights 2, fp32 gradients 4, master weights 4, two moments 8: the Megatron deck's count.

    Gradients and weights are held together from the second microbatch's forward pass on.
    """
    options = ("--zero.stage", "0", "--precision", "bf16", "--batch.global_batch_size", "16")
    config = config_of(*options, "--batch.microbatches", "2", "--batch.sequence_length", "128")
    forward = trace_run(config).memory.phases["head"]
    parts = {"gathered weights": 2, "gradients": 4, "master weights": 4, "optimizer moments": 8}
    parameters = parameter_count(config.model)
    assert {kind: forward[kind] / parameters for kind in parts} == pytest.approx(parts, rel=1e-3)


def test_kernels_that_travel_as_fp8_numbers_are_held_as_such():
    """A byte a number, and two for all other weights."""
    options = (
        "--precision",
        "fp8-delayed",
        "--batch.global_batch_size",
        "16",
        "--batch.microbatches",
        "2",
    )
    step = trace_run(config_of(*options, "--batch.sequence_length", "128"))
    shapes = jax.tree.leaves_with_path(parameter_shapes(step.model)["layers"])
    kernels = sum(leaf.size for path, leaf in shapes if path[-1].key == "kernel")
    held = step.memory.phases["head"]["gathered weights"]
    parameters = parameter_count(step.model)
    assert held == pytest.approx(2 * parameters - kernels, rel=1e-3)
    assert kernels > parameters / 3


def test_tensor_and_expert_ranks_hold_their_part_of_the_state():
    whole = trace_run(config_of("--mesh.dc", "2", "--mesh.data", "4", *EXPERTS))
    parts = trace_run(config_of(*LAYOUTS["experts"]))
    for step in (whole, parts):
        assert step.memory.by_use["master weights"] == sum(
            size(leaf.shard_shape)
            for leaf in jax.tree.leaves(step.layouts.parameters)
            if isinstance(leaf, LeafLayout)
        )


def test_sharding_across_sites_holds_less_and_sends_weights_instead_of_gradients():
    default, across = (
        trace_run(config_of("--precision", "bf16", "--zero.across_sites", choice))
        for choice in ("false", "true")
    )
    kinds = ("master weights", "optimizer moments")
    first, second = (sum(step.memory.by_use[kind] for kind in kinds) for step in (default, across))
    assert second == pytest.approx(first / 2, rel=1e-3)
    # With two sites: all-reduce of 1/4 of the fp32 gradient, 2 (2 - 1) / 2 of it; or its
    # reduce-scatter, half of that, and the all-gather of as many bf16 weights.
    parameters = parameter_count(default.model)
    assert default.traffic.bytes_over("dc") == pytest.approx(parameters / 4 * 4, rel=1e-3)
    assert across.traffic.bytes_over("dc") == pytest.approx(parameters / 4 * (2 + 1), rel=1e-2)


def test_the_table_touches_no_device():
    program = (
        "from pathlib import Path\n"
        "from geojax.runtime.jax_private import backend_runs\n"
        "from geojax.config.run_config import RunConfig\n"
        "from geojax.planner.resolve.traced_run import trace_run\n"
        f"config = RunConfig.load(Path({str(QUICKSTART)!r}))\n"
        "step = trace_run(config)\n"
        "assert step.memory.bytes > 0\n"
        "assert step.traffic.bytes_over('dc') > 0\n"
        "assert not backend_runs()\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=QUICKSTART.parents[1])
